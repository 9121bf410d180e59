"""The kernel's end of one agent, however the agent came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accel.launch import wire
    from notebook_accel.launch.transport.channel import Channel

__all__ = ["AgentLink", "LostAgent"]


@dataclass(frozen=True, kw_only=True)
class AgentLink:
    """How a run reaches one of its agents.

    Attributes:
        channel: to the agent.
        ranks: those that it starts.
        sees_files: whether it sees the kernel's files, and so the run's folder.
        how_it_ended: says how the agent's process ended, for an error's text; "" where unknown.
        kill: ends the agent, and its ranks with it.
    """

    channel: Channel
    ranks: tuple[wire.RankSpec, ...]
    sees_files: bool
    how_it_ended: Callable[[], str]
    kill: Callable[[], None]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its ranks among all ranks of the run."""
        return tuple(spec.rank for spec in self.ranks)


@dataclass(frozen=True)
class LostAgent:
    """An agent that ended before its ranks had.

    Attributes:
        ranks: the numbers of its ranks.
        how: it ended, as the rest of a sentence.
    """

    ranks: tuple[int, ...]
    how: str
