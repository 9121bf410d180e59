"""In the kernel: one thread a run that folds the agent's messages into the run's state.

It holds the run's only connection, keeps results until somebody asks for them, writes metrics to
disk, has the view draw at most five times a second, and decides at the end what came of it.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import selectors
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import wire
from notebook_accel.launch.control.interrupts import Latch, held
from notebook_accel.launch.control.stacks import readable
from notebook_accel.launch.control.state import apply
from notebook_accel.launch.control.verdict import Verdict, judge
from notebook_accel.launch.run import Conductor
from notebook_accel.launch.transport.channel import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_accel.launch.control.agent_link import AgentLink
    from notebook_accel.launch.control.results import Results
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.control.stores import MetricStore, RunFolder
    from notebook_accel.launch.control.verdict import Failure
    from notebook_accel.launch.view import View

__all__ = ["Supervisor"]

_DRAW_SECONDS = 0.2
_STACKS_SECONDS = 5.0
_POLL_SECONDS = 0.01
# An agent that was told to kill and does not answer is killed itself; its ranks go with it.
_DEAF_SECONDS = 3.0

_log = logging.getLogger(__name__)


class Supervisor(Conductor):
    """Conducts a run whose ranks an agent holds."""

    def __init__(
        self,
        *,
        link: AgentLink,
        state: RunState,
        results: Results,
        folder: RunFolder,
        metrics: MetricStore,
        view: View,
        timeout: float | None,
        closing_notices: Callable[[RunState], Sequence[str]],
        labels: Mapping[str, str],
    ) -> None:
        self.state = state
        self.ended = Latch()
        self._state_lock = threading.Lock()
        self._link = link
        self.results = results
        self._folder = folder
        self._metrics = metrics
        self._view = view
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._closing_notices = closing_notices
        self._send_lock = threading.Lock()
        self._stacks = _Stacks()
        self._labels = labels
        self._stopped_at: float | None = None
        self._firm = False
        self._stops = 0
        self._kill_asked: float | None = None
        self._verdict = Verdict(status="starting")
        self._next_draw = 0.0
        self._drawn: RunState | None = None
        # ipykernel 7.0 needs the caller's context for displays from a thread.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._serve,), name=f"supervisor-{state.run}", daemon=True
        )

    def start(self) -> None:
        """Begin to follow the run."""
        self._thread.start()

    # ---- what the handle asks --------------------------------------------------------------

    def failure(self) -> Failure | None:
        return self._verdict.failure

    def stop(self, grace: float | None = None) -> None:
        self._stops += 1
        if self._stops > 1:
            self.press(1)
        elif self._end(firm=False):
            self._send(wire.Stop(run=self.state.run, grace=grace))

    def press(self, number: int) -> None:
        kinds: list[type[wire.Message]] = [wire.Interrupt, wire.Terminate, wire.Kill]
        if number >= len(kinds):
            self.kill()
        elif self._end(firm=True):
            self._send(kinds[number - 1](run=self.state.run))

    def kill(self) -> None:
        if self._end(firm=True):
            self._kill_asked = self._kill_asked or time.monotonic()
            self._send(wire.Kill(run=self.state.run))

    def stacks(self, rank: int | None = None) -> str:
        ranks = [state for state in self.state.ranks if rank in (None, state.rank)]
        waiting = [state.rank for state in ranks if not state.has_ended]
        if not self.state.has_ended and waiting:
            self._stacks.expect(waiting)
            self._send(wire.DumpStacks(run=self.state.run, rank=rank))
            self._stacks.wait(_STACKS_SECONDS)
        texts = [(state.rank, self._stacks.text(state.rank)) for state in ranks]
        return "\n".join(f"rank {number}\n{text}" for number, text in texts)

    def _end(self, *, firm: bool) -> bool:
        """Note that somebody wants the end; False where the run has ended already."""
        with held(), self._state_lock:
            if self.state.has_ended:
                return False
            if self._stopped_at is None:
                self._stopped_at = time.time()
            self._firm = self._firm or firm
            if self.state.status in ("starting", "running"):
                self.state = replace(self.state, status="stopping")
            return True

    def _send(self, message: wire.Message) -> None:
        with held(), self._send_lock, contextlib.suppress(OSError, ValueError):
            self._link.channel.send(message)

    # ---- the thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        lost: str | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._link.channel.fileno(), selectors.EVENT_READ)
            try:
                while not self._all_ended():
                    if selector.select(_DRAW_SECONDS / 2):
                        self._take()
                    self._look_at_clock()
                    self._draw()
            except (EOFError, OSError, ProtocolError) as error:
                lost = self._link.how_it_ended() or f"was lost ({error})"
            except Exception as error:  # nobody else would ever end this run
                _log.warning("run %s cannot be followed", self.state.run, exc_info=True)
                lost = f"said what could not be understood ({type(error).__name__}: {error})"
        self._finish(lost)

    def _all_ended(self) -> bool:
        return all(rank.has_ended for rank in self.state.ranks)

    def _take(self) -> None:
        for message, fds in self._link.channel.drain():
            self._keep(message, fds)
            with self._state_lock:
                self.state = apply(message, self.state)

    def _keep(self, message: wire.Message, fds: list[int]) -> None:
        """What must outlive the state: results, metrics, stacks."""
        if isinstance(message, wire.Returned) and message.rank is not None:
            assert self.results is not None, "nothing comes after the end"
            self.results.keep(message.rank, message.value, fds)
        elif isinstance(message, wire.Metric) and message.rank is not None:
            self._metrics.add(
                wall=message.wall, rank=message.rank, step=message.step, values=message.values
            )
        elif isinstance(message, wire.Stacks) and message.rank is not None:
            self._stacks.put(message.rank, readable(message.text, self._labels))

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._time_out()
        if self._kill_asked is not None and now >= self._kill_asked + _DEAF_SECONDS:
            self._link.kill()
            self._kill_asked = now

    def _time_out(self) -> None:
        """The first time politely, then harder: a grace period between each."""
        if not self.timed_out:
            self.timed_out = True
            self.stop()
        else:
            self.press(self._stops)
            self._stops += 1
        self._deadline = time.monotonic() + self._link.grace

    def _draw(self) -> None:
        now = time.monotonic()
        if now < self._next_draw:
            return
        self._next_draw = now + _DRAW_SECONDS
        self._metrics.flush()
        if self.state is not self._drawn:
            self._drawn = self.state
            self._view.update(self.state)

    def _finish(self, lost: str | None) -> None:
        if lost is not None:
            self._link.kill()
        try:
            with self._state_lock:
                self._conclude(lost)
        finally:
            # Somebody may be sending a last wish.
            with self._send_lock:
                self._link.channel.close()
            self._view.close(self.state)
            self.ended.set()

    def _conclude(self, lost: str | None) -> None:
        """The final state; nobody may change it any more."""
        if lost is not None:
            self.state = replace(self.state, ranks=tuple(map(_lost_with_agent, self.state.ranks)))
        verdict = judge(
            self.state,
            stopped_at=self._stopped_at,
            firm=self._firm,
            lost_agent=lost,
            log_dir=str(self._folder.path),
        )
        error = verdict.failure.message if verdict.failure else ""
        notices = (*self.state.notices, *self._closing_notices(self.state))
        state = replace(
            self.state, status=verdict.status, ended=time.time(), error=error, notices=notices
        )
        self._metrics.close()
        self._stacks.close()
        # What is large, and what holds the notebook's function: the handle has it, nobody else.
        self.results = None
        self._closing_notices = lambda _: ()
        self._folder.save(state)
        self._verdict = verdict
        self.state = state


def _lost_with_agent(rank: Any) -> Any:
    if rank.has_ended:
        return rank
    status = rank.status if rank.returned else "failed"
    return replace(rank, status=status, ended=time.time(), ended_by_us=True)


class _Stacks:
    """The newest dump of each rank, and who waits for it.

    Without a lock: an interrupt of whoever waits must not hold up the supervisor.
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
