"""The messages by which all ranks of a run do one thing at one point (actions/scoreboard.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from notebook_accel.wire import KnobValue, Message


class Post(Protocol):
    """Sends the other side a message of this class, with these fields, about one call."""

    def __call__(self, kind: type[Message], /, **fields: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Passed:
    """An agent's answer to a request: how far its ranks have come in this call.

    Attributes:
        batches, reads, begun, saves: the highest count of batches, reads of ``should_stop``,
            optimizer steps without a loader, and reads of ``should_save``, at which any rank of the
            agent went on with its loop.
    """

    batches: int = 0
    reads: int = 0
    begun: int = 0
    saves: int = 0
    reads_should_stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where all ranks act: the first batch, read or step with such a number, counted from 1.

    None stands for points at which nobody acts.
    """

    batches: int | None = None
    reads: int | None = None
    begun: int | None = None
    saves: int | None = None


NOWHERE = Point()


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do at one common point of their training (actions/scoreboard.py).

    Attributes:
        folder: where a save goes; "" leaves that to the function.
    """

    kind: Literal["set", "save", "pause"]
    values: dict[str, KnobValue] = {}
    folder: str = ""


class PointReached(Message, frozen=True, kw_only=True):
    """From an agent, in answer to ``Stop`` or ``Act``: how far its ranks have come in their loops.

    From the answers of all agents the kernel chooses a later point, at which all ranks act
    (:class:`ActAt`); actions/scoreboard.py explains how.

    Attributes:
        number: of the action; ``scoreboard.STOP`` for a stop.
        refused: why this machine cannot do the action; "" if it can.
    """

    number: int
    passed: Passed = Passed()
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

    ``NOWHERE`` withdraws the action.
    """

    number: int
    point: Point


class Hold(Message, frozen=True, kw_only=True):
    """Request to an agent: let no rank begin the action, until the next ``ActAt``."""

    number: int


class GoOn(Message, frozen=True, kw_only=True):
    """Request to an agent: end the pause that was the action of this number."""

    number: int
