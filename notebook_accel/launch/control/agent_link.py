"""The kernel's end of an agent, however the agent came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accel.launch.transport.channel import Channel

__all__ = ["AgentLink"]


@dataclass(frozen=True, kw_only=True)
class AgentLink:
    """How a run's supervisor reaches its agent.

    Attributes:
        channel: to the agent.
        grace: seconds between the stages of an end.
        how_it_ended: says how the agent's process ended, for an error's text.
        kill: ends the agent, and its ranks with it.
    """

    channel: Channel
    grace: float
    how_it_ended: Callable[[], str]
    kill: Callable[[], None]
