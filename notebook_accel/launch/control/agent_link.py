"""The kernel's end of one agent, however the agent came about."""

from __future__ import annotations

import contextlib
import logging
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.text.wording import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_accel.launch import wire
    from notebook_accel.launch.transport.channel import Channel

__all__ = ["AgentEnd", "AgentLink", "LostAgent"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentEnd:
    """How an agent's process ended.

    Attributes:
        how: the rest of a sentence about it, such as "(pid 7) was killed by SIGKILL".
        traceback: of the exception that ended it; "" where there was none.
        likely: the likely cause, where the link knows better than that it was killed.
    """

    how: str
    traceback: str = ""
    likely: str = ""

    @classmethod
    def of_own_failure(cls, error: Exception, run: str) -> AgentEnd:
        """Return the end of an agent whose connection this process itself failed to serve."""
        _log.warning("run %s cannot be conducted", run, exc_info=error)
        how = f"was ended, since notebook_accel itself failed ({type(error).__name__}: {error})"
        return cls(how, "".join(traceback.format_exception(error)))

    @property
    def in_its_own_words(self) -> str:
        """Return the traceback as the end of an error message; "" without one."""
        return f" Its own error:\n\n{self.traceback.rstrip()}" if self.traceback else ""


@dataclass(frozen=True, kw_only=True)
class AgentLink:
    """The connection to one agent of a run, its ranks, and the functions that end it.

    Attributes:
        channel: connection to the agent.
        ranks: ranks that the agent starts.
        sees_files: whether the agent sees the kernel's files, and so the run's folder.
        how_it_ended: returns how the agent's process ended, for an error's text; None if unknown.
        kill: ends the agent, and its ranks with it.
        launch_fields: fields of ``wire.Launch`` that are its machine's own.
    """

    channel: Channel
    ranks: tuple[wire.RankSpec, ...]
    sees_files: bool
    how_it_ended: Callable[[], AgentEnd | None]
    kill: Callable[[], None]
    launch_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The numbers of its ranks among all ranks of the run."""
        return tuple(spec.rank for spec in self.ranks)

    def post(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send without blocking; an agent that is gone gets nothing.

        Raises:
            OSError: this process has no room for one more descriptor, so that nothing was sent.
        """
        self.channel.post(message, fds)
        with contextlib.suppress(OSError, ValueError):
            self.channel.flush(block=False)

    def end(self) -> None:
        """End the agent and its ranks, as far as the system lets us."""
        try:
            self.kill()
        except Exception:  # whatever the system refuses, the run must end
            _log.warning("the agent of %s could not be ended", self.rank_numbers, exc_info=True)

    @property
    def silence(self) -> str:
        """Return a line for the person about an agent that has been silent."""
        return (
            f"the helper process that watches {rank_list(self.rank_numbers)} says nothing: it may "
            "be stopped (SIGSTOP), or its machine too busy. When it goes on, so does the run; "
            "run.stop() ends it"
        )


@dataclass(frozen=True)
class LostAgent:
    """An agent that ended before its ranks had.

    Attributes:
        ranks: the numbers of its ranks.
        end: how it ended.
    """

    ranks: tuple[int, ...]
    end: AgentEnd
