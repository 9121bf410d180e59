"""The messages by which all ranks of a run do one thing at one point (transport/scoreboard.py)."""

from __future__ import annotations

from typing import Literal

import msgspec

from notebook_accel.launch.wire import KnobValue, Message


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do at one common point of their training (transport/scoreboard.py)."""

    kind: Literal["set", "save", "pause"]
    values: dict[str, KnobValue] = {}


class PointReached(Message, frozen=True, kw_only=True):
    """From an agent, in answer to ``Stop`` or ``Act``: how far its ranks have come in their loops.

    From the answers of all agents the kernel chooses a later point, at which all ranks act
    (:class:`ActAt`); transport/scoreboard.py explains how, and what the counts are.

    Attributes:
        refused: why this machine cannot do the action; "" if it can.
    """

    number: int
    batches: int = 0
    reads: int = 0
    begun: int = 0
    saves: int = 0
    reads_should_stop: bool = False
    refused: str = ""


class HoldAnswered(Message, frozen=True, kw_only=True):
    """From an agent, in answer to ``Hold``: whether a rank of its had begun the action by then."""

    number: int
    did: bool


class ActionDone(Message, frozen=True, kw_only=True):
    """From an agent: its ranks have done the action, or have ended their part of the call."""

    number: int
    num_ranks: int


class PauseEnded(Message, frozen=True, kw_only=True):
    """From an agent, in answer to ``GoOn``: its ranks train again."""


class Act(Message, frozen=True, kw_only=True):
    """Request to an agent: have all ranks do an action at a common point of their training."""

    number: int
    content: bytes


class ActAt(Message, frozen=True, kw_only=True):
    """From the kernel to all agents, after all have answered ``Stop`` or ``Act``: where ranks act.

    Attributes:
        batches, reads, begun, saves: the first batch, read of ``should_stop``, step of an
            optimizer, or read of ``should_save`` with such a number, from 1 on; None where nobody
            acts. All None withdraw the action.
    """

    number: int
    batches: int | None = None
    reads: int | None = None
    begun: int | None = None
    saves: int | None = None


class Hold(Message, frozen=True, kw_only=True):
    """Request to an agent: let no rank begin the action, until the next ``ActAt``."""

    number: int


class GoOn(Message, frozen=True, kw_only=True):
    """Request to an agent: end the pause that was the action of this number."""

    number: int
