"""The notebook kernel's connection to one agent, and how the agent's process ended.

An agent is the helper process that starts and watches the ranks of one machine.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notebook_accel import wire
from notebook_accel.launch.text.wording import rank_list
from notebook_accel.launch.transport.channel import Channel

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentEnd:
    """How an agent's process (the helper that watches the ranks of a machine) ended, in words.

    Attributes:
        traceback: traceback of the exception that ended the agent; "" if there was none.
        likely: the likely cause, as a clause; "" lets the error name the usual cause of a SIGKILL
            (out of memory, or killed by somebody).
    """

    how: str
    traceback: str = ""
    likely: str = ""

    @classmethod
    def of_own_failure(cls, error: Exception, run: str) -> AgentEnd:
        """Return the ``AgentEnd`` of an agent that is killed since the kernel's own code failed."""
        _log.warning("run %s cannot be conducted", run, exc_info=error)
        how = f"was ended, since notebook_accel itself failed ({type(error).__name__}: {error})"
        return cls(how, "".join(traceback.format_exception(error)))


@dataclass(frozen=True, kw_only=True)
class AgentLink:
    """The notebook kernel's connection to one agent of a run, with functions to end the agent.

    An agent is the helper process that starts and watches the ranks of one machine. The engine
    makes a link for each agent that it starts; the ``RankPool`` of the run uses it.

    Attributes:
        how_it_ended: waits at most some seconds for the end of the agent's process, and returns how
            the process ended; None if unknown.
    """

    channel: Channel
    ranks: tuple[wire.RankSpec, ...]
    how_it_ended: Callable[[], AgentEnd | None]
    kill: Callable[[], None]
    launch_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        return tuple(spec.rank for spec in self.ranks)

    def post(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send a message to the agent without blocking.

        What the socket cannot take now stays queued; the thread of the ``RankPool`` writes it
        later. If the agent is gone, that thread notices it, and no error is raised here.

        Raises:
            OSError: this process may open no more file descriptors; nothing was sent.
        """
        self.channel.post(message, fds)
        with contextlib.suppress(OSError, ValueError):
            self.channel.flush(block=False)

    def end(self) -> None:
        """Kill the agent and its ranks; an error is logged, not raised, so that the run can end."""
        try:
            self.kill()
        except Exception:  # whatever the system refuses, the run must end
            _log.warning("the agent of %s could not be ended", self.rank_numbers, exc_info=True)

    @property
    def silence(self) -> str:
        """Message for the user when the agent has sent nothing for 20 seconds (``RankPool``)."""
        return (
            f"the helper process that watches {rank_list(self.rank_numbers)} says nothing: it may "
            "be stopped (SIGSTOP), or its machine too busy. When it goes on, so does the run; "
            "run.stop() ends it"
        )


@dataclass(frozen=True)
class LostAgent:
    """An agent (the helper process that watches the ranks of a machine) that ended too early.

    Its process or its connection ended while some of its ranks still ran; those ranks are lost.
    """

    ranks: tuple[int, ...]
    end: AgentEnd
