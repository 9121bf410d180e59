"""In the kernel: the rank processes of a run or session, and the thread that listens to them.

    Supervisor (one a call) --Call, Stop, ...--> RankPool --channel--> agent
    Supervisor <-- what is said about its call -- RankPool <--channel-- agent

The pool holds the only connection. Its thread keeps the states of the processes, hands what is
said about the running call to that call's supervisor, and gives it its turn to draw and to look at
the clock. It ends when all rank processes have ended, or the agent was lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from typing import TYPE_CHECKING

from notebook_accel.errors import LaunchError
from notebook_accel.launch import wire
from notebook_accel.launch.control.interrupts import Latch, held
from notebook_accel.launch.control.state import ProcessState, apply_to_processes
from notebook_accel.launch.system.processes import signal_name
from notebook_accel.launch.transport.channel import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.launch.control.agent_link import AgentLink
    from notebook_accel.launch.control.supervisor import Supervisor

__all__ = ["RankPool"]

_TICK_SECONDS = 0.1
# Between calls there is nothing to draw, and messages wake the thread.
_IDLE_SECONDS = 1.0
_STACKS_SECONDS = 5.0
_POLL_SECONDS = 0.01
# An agent that was told to kill and does not answer is killed itself; its ranks go with it.
_DEAF_SECONDS = 3.0

_log = logging.getLogger(__name__)


class RankPool:
    """The rank processes behind an agent. They run one call at a time.

    Attributes:
        run: id of the run or session.
        processes: the newest state of each rank's process.
        ended: set once all of them have ended.
        grace: seconds between the stages of an end.
    """

    def __init__(self, link: AgentLink, *, run: str, world_size: int) -> None:
        """Take over the processes that were, or are to be, launched behind ``link``.

        Args:
            link: to their agent.
            run: id of the run or session.
            world_size: number of ranks.
        """
        self.run = run
        self.processes = tuple(ProcessState(rank=rank) for rank in range(world_size))
        self.ended = Latch()
        self.grace = link.grace
        self._link = link
        # Guards what callers' threads and the pool's own thread both change.
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._call: Supervisor | None = None
        self._num_calls = 0
        self._group_generation = 0
        self._is_leaving = False
        self._lost: str | None = None
        self._kill_asked: float | None = None
        self._stacks = _Stacks()
        self._thread = threading.Thread(target=self._serve, name=f"ranks-{run}", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    # ---- calls -----------------------------------------------------------------------------

    def begin_call(
        self,
        supervisor: Supervisor,
        *,
        payload: wire.Packet,
        fds: Sequence[int],
        grace: float,
        last: bool,
    ) -> None:
        """Send a call to all ranks; what they say about it goes to ``supervisor``.

        Args:
            supervisor: of the call.
            payload: what is called.
            fds: the descriptors that belong to it; they stay the caller's.
            grace: seconds that handlers of a KeyboardInterrupt get.
            last: whether the ranks leave after it.

        Raises:
            LaunchError: a call is running, or a rank process has ended.
        """
        with held():
            with self._lock:
                problem = self._why_no_call()
                if problem:
                    raise LaunchError(problem)
                self._num_calls += 1
                self._is_leaving = last
                supervisor.begin(self._num_calls)
                self._call = supervisor
                message = wire.Call(
                    run=self.run,
                    call=self._num_calls,
                    payload=payload,
                    grace=grace,
                    last=last,
                    group_generation=self._group_generation,
                )
            # An agent that is dead already is the thread's to tell.
            self.send(message, fds)

    def _why_no_call(self) -> str | None:
        """What stands against a new call, as a sentence with its remedy; None for nothing."""
        if self._call is not None:
            return "the ranks are still in a call: wait for it (run.wait()) or stop it (run.stop())"
        if self._lost is not None:
            return f"the process that watches the ranks {self._lost}: start them again"
        dead = [process for process in self.processes if process.status == "ended"]
        if dead:
            how = "; ".join(_how_it_ended(process) for process in dead)
            return f"{how}. What the ranks had is lost: start them again"
        if self._is_leaving:
            return "the ranks were told to leave: start them again"
        return None

    @property
    def is_in_call(self) -> bool:
        """Whether a call is running."""
        return self._call is not None

    # ---- what anybody may ask ----------------------------------------------------------------

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send a message to the agent; one that is gone gets nothing, and is told of elsewhere."""
        with held(), self._send_lock, contextlib.suppress(OSError, ValueError):
            self._link.channel.send(message, fds)

    def leave(self) -> None:
        """No more calls come: the rank processes end after the one that they are in."""
        self._is_leaving = True
        self.send(wire.Leave(run=self.run))

    def kill(self, *, call: int = 0) -> None:
        """SIGKILL the ranks that are in the call of this number; with 0, all of them."""
        self._kill_asked = self._kill_asked or time.monotonic()
        self.send(wire.Kill(run=self.run, call=call))

    def stacks(self, rank: int | None = None) -> list[tuple[int, str]]:
        """Where the Python of one rank, or of each, stands: its number and faulthandler's text."""
        chosen = [process for process in self.processes if rank in (None, process.rank)]
        alive = [process.rank for process in chosen if process.status != "ended"]
        if alive and not self.ended.is_set():
            self._stacks.expect(alive)
            self.send(wire.DumpStacks(run=self.run, rank=rank))
            self._stacks.wait(_STACKS_SECONDS)
        return [(process.rank, self._stacks.text(process.rank)) for process in chosen]

    # ---- the thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._link.channel.fileno(), selectors.EVENT_READ)
            try:
                while not self._all_ended():
                    is_idle = self._call is None and self._kill_asked is None
                    if selector.select(_IDLE_SECONDS if is_idle else _TICK_SECONDS):
                        self._take()
                    self._tick()
            except (EOFError, OSError, ProtocolError) as error:
                self._lost = self._link.how_it_ended() or f"was lost ({error})"
            except Exception as error:  # nobody else would ever end these ranks
                _log.warning("run %s cannot be followed", self.run, exc_info=True)
                self._lost = f"said what could not be understood ({type(error).__name__}: {error})"
        self._finish()

    def _all_ended(self) -> bool:
        return all(process.status == "ended" for process in self.processes)

    def _take(self) -> None:
        for message, fds in self._link.channel.drain():
            self.processes = apply_to_processes(message, self.processes)
            call = self._call
            if isinstance(message, wire.Stacks) and message.rank is not None:
                self._stacks.put(message.rank, message.text)
            # What is about processes (0) concerns every call.
            if call is not None and message.call in (0, call.number):
                call.take(message, fds)
            else:
                for fd in fds:
                    os.close(fd)

    def _tick(self) -> None:
        call = self._call
        if call is not None:
            call.tick()
            if call.is_over and not self._is_leaving:
                self._end_call(call)
        if self._kill_asked is not None and time.monotonic() >= self._kill_asked + _DEAF_SECONDS:
            self._kill_asked = time.monotonic()
            self._kill_agent()

    def _end_call(self, call: Supervisor) -> None:
        with self._lock:
            self._call = None
            self._kill_asked = None
            if not call.ended_well:
                # A rank that left its loop early, or was interrupted in a collective, may have
                # the group in a state that the others do not share.
                self._group_generation += 1
        call.finish(None)

    def _finish(self) -> None:
        """All rank processes have ended, or will now."""
        if self._lost is not None:
            self._kill_agent()
        # Somebody may be sending a last wish.
        with self._send_lock:
            self._link.channel.close()
        self._stacks.close()
        with self._lock:
            call, self._call = self._call, None
        self.ended.set()
        if call is not None:
            call.finish(self._lost)

    def _kill_agent(self) -> None:
        try:
            self._link.kill()
        except Exception:  # whatever the system refuses, the run must end
            _log.warning("the agent of run %s could not be ended", self.run, exc_info=True)


def _how_it_ended(process: ProcessState) -> str:
    if process.signal is not None:
        return f"rank {process.rank} was killed by {signal_name(process.signal)}"
    return f"rank {process.rank} ended with exit code {process.exitcode}"


class _Stacks:
    """The newest dump of each rank, and who waits for it.

    Without a lock: an interrupt of whoever waits must not hold up the pool's thread.
    """

    def __init__(self) -> None:
        self._expected: set[int] = set()
        self._texts: dict[int, str] = {}

    def expect(self, ranks: Sequence[int]) -> None:
        self._expected.update(ranks)

    def put(self, rank: int, text: str) -> None:
        self._texts[rank] = text
        self._expected.discard(rank)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._expected and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self._expected.clear()

    def text(self, rank: int) -> str:
        return self._texts.get(rank, "the rank has ended\n")

    def close(self) -> None:
        self._texts.clear()
        self._expected.clear()
