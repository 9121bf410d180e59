"""In the kernel: one call of a function on all ranks, from its sending to its verdict.

It folds what the ranks say about the call into the run's state, keeps results until somebody asks
for them, writes metrics to disk, has the view draw at most five times a second, and decides at the
end what came of it. The thread of the call's :class:`RankPool` brings it the messages and gives it
its turns; the methods of a :class:`Conductor` are for the threads of whoever holds the run.

A call ends in this order, in the pool's thread up to ``ended``::

    the last rank's Returned, Raised or RankEnded -> is_over
    CallEnded to the agents; all output of the call is here
    finish: final state (verdict, metrics file closed, state saved) -> view.close -> ended is set
    the thread that waits: view.print_end, then the run's error is raised (run.py)

Where the launch itself fails, before there is a run, ``view.launch_failed`` is all that is called.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
import traceback
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from notebook_accel.launch import wire
from notebook_accel.launch.control.conductor import Conductor
from notebook_accel.launch.control.curves import LiveCurves
from notebook_accel.launch.control.hang_watch import HangWatch
from notebook_accel.launch.control.stacks import stacks_text
from notebook_accel.launch.control.state import RESCUED, Failure, apply, starting
from notebook_accel.launch.control.verdict import judge
from notebook_accel.launch.system.interrupts import Latch, held
from notebook_accel.launch.system.open_files import make_room
from notebook_accel.launch.text.terminal_text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_accel.launch.control.agent_link import LostAgent
    from notebook_accel.launch.control.metrics_file import MetricStore
    from notebook_accel.launch.control.pool import RankPool
    from notebook_accel.launch.control.results import Results
    from notebook_accel.launch.control.run_folder import RunFolder
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.view import View

__all__ = ["Restarts", "Supervisor"]

_log = logging.getLogger(__name__)

# Five times a second looks live; a page that redraws more often makes the notebook slow.
_DRAW_SECONDS = 0.2
# Characters of why the ranks are started again.
_MAX_REASON = 200
# What the kernel opens at the end of a call, beside the descriptor of each rank's result.
_FILES_OF_END = 8


class Restarts(Protocol):
    """How the ranks of a call are started again after a failure.

    Attributes:
        left: how often that may still be done.
        next_one: says which one comes next, in a line for the person.
    """

    left: int

    @property
    def next_one(self) -> str: ...

    def begin(self, call: Supervisor) -> None:
        """Start ranks, and send them the call of ``call``, which gets them by ``renew``.

        Raises:
            NotebookAccelError, OSError: they could not be started; nothing is left of them.
        """

    def close(self) -> None:
        """No more are wanted."""


class Supervisor(Conductor):
    """Conducts one call on the ranks of a pool.

    The pool calls ``begin``, then ``take``, ``lose`` and ``tick`` from its thread, and ``finish``
    once, at the end. ``note_stop`` may come from any thread.
    """

    def __init__(
        self,
        *,
        pool: RankPool,
        state: RunState,
        results: Results,
        metrics: MetricStore,
        view: View,
        timeout: float | None,
        closing_notices: Callable[[RunState], Sequence[str]],
        labels: Mapping[str, str],
        folder: RunFolder,
        handle: Callable[[], str],
        restarts: Restarts | None = None,
    ) -> None:
        """Make ready; ``RankPool.send_call`` sends the call.

        Args:
            pool: the ranks.
            state: before the call was sent.
            results: takes what comes back; the run's handle has it too.
            metrics: where the ranks' metrics are written; closed at the end.
            view: draws the run.
            timeout: seconds after which the call is ended; None for never.
            closing_notices: lines for the person that only the last state can tell.
            labels: what a person calls each cell, by the name of its file.
            folder: of the run; the last state is saved there.
            handle: gives what a person types for the run, for errors and notices.
            restarts: starts the ranks again after a failure; None where that is not asked for.
        """
        self.number = 0
        self.state = state
        self.ended = Latch()
        # Reentrant: a finalizer that stops the call may run in a thread that holds it.
        self._state_lock = threading.RLock()
        self._pool = pool
        self.results = results
        self._folder = folder
        self._handle = handle
        self._metrics = metrics
        self._view = view
        self.timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._closing_notices = closing_notices
        self._labels = labels
        self._hangs = HangWatch(labels)
        self.curves: LiveCurves | None = LiveCurves()
        self._restarts = restarts
        self._is_stopped = False
        self._is_time_over = False
        self._num_stops = 0
        self._next_draw = 0.0
        self._drawn: RunState | None = None
        # ipykernel 7.0 needs the context of the cell for displays from a thread.
        self._context = contextvars.copy_context()

    # ---- what the handle asks --------------------------------------------------------------

    def handle(self) -> str:
        return self._handle()

    def stop(self, grace: float | None = None) -> None:
        self._num_stops += 1
        if self._num_stops > 1:
            self.press(1)
        elif self.note_stop():
            self._pool.stop(call=self.number, grace=grace)

    def press(self, number: int) -> None:
        ends = [self._pool.interrupt, self._pool.terminate]
        if number > len(ends):
            self.kill()
        elif self.note_stop():
            ends[number - 1](call=self.number)

    def kill(self) -> None:
        if self.note_stop():
            self._pool.kill(call=self.number)

    def stacks(self, rank: int | None = None) -> str:
        return stacks_text(self._pool.stacks(rank), self._labels)

    def note_stop(self) -> bool:
        """Note that somebody wants the end; False where the call has ended already."""
        with held(), self._state_lock:
            if self.state.has_ended:
                return False
            # Once every rank has ended its part, a stop only hurries the exit of the processes: the
            # call keeps its result.
            # Of one that failed and may begin again, there is more to come.
            has_result = self.is_over and (self._restarts is None or self.ended_well)
            self._is_stopped = self._is_stopped or not has_result
            if self.state.status in ("starting", "running"):
                self.state = replace(self.state, status="stopping")
            return True

    # ---- what the pool calls: `begin` in the launching thread, the rest in its own

    def begin(self, number: int) -> None:
        """Note the call's number before it is sent; once more, with 0, if it could not be sent."""
        self.number = number
        ranks = (
            replace(rank, pid=process.pid, agent=process.agent)
            for rank, process in zip(self.state.ranks, self._pool.processes, strict=True)
        )
        self.state = replace(self.state, ranks=tuple(ranks))

    @property
    def is_over(self) -> bool:
        """Whether every rank's part of the call has ended."""
        return all(rank.has_ended for rank in self.state.ranks)

    @property
    def ended_well(self) -> bool:
        return self.state.ended_well

    def take(self, message: wire.Message, fds: Sequence[int]) -> None:
        """Keep what a message brings; its descriptors are the call's from now on."""
        if isinstance(message, wire.Returned) and message.rank is not None:
            assert self.results is not None, "nothing comes after the end"
            self.results.keep(message.rank, message.value, list(fds))
            fds = ()
        elif isinstance(message, wire.Raised) and message.rescued and message.rank is not None:
            assert self.results is not None, "nothing comes after the end"
            self.results.keep_part(message.rank, message.rescued, list(fds))
            fds = ()
        for fd in fds:
            # Only results bring descriptors. Others come from code in the rank that wrote to its
            # channel.
            os.close(fd)
        if isinstance(message, wire.Metrics):
            self._metrics.add(message.metrics)
            for metric in message.metrics:
                if self.curves is not None and metric.rank is not None:
                    self.curves.add(metric.rank, metric.step, metric.values)
        elif isinstance(message, wire.Stacks):
            self._hangs.take(message)
        self._change(partial(apply, message))

    def lose(self, ranks: Sequence[int]) -> None:
        """The agent of these ranks is gone, and they are with it."""

        def without(state: RunState) -> RunState:
            lost = (
                replace(rank, status="failed", ended=time.time(), ended_by_agent=True)
                if rank.rank in ranks and not rank.has_ended
                else rank
                for rank in state.ranks
            )
            return replace(state, ranks=tuple(lost))

        self._change(without)

    def _change(self, change: Callable[[RunState], RunState]) -> None:
        """Change the state while the call runs."""
        with self._state_lock:
            before = self.state
            state = change(before)
            if self.state is not before and state.status in ("starting", "running"):
                # A finalizer has stopped the call meanwhile, in this very thread (`note_stop`).
                state = replace(state, status="stopping")
            self.state = state

    def tick(self) -> None:
        """Look at the clock, and draw if that is due."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._time_out()
        if now < self._next_draw:
            return
        self._next_draw = now + _DRAW_SECONDS
        self._heed_others()
        # A result is lost if no descriptor is free when it comes.
        make_room(self.state.world_size + _FILES_OF_END)
        self._metrics.flush()
        if self._metrics.lost_notice:
            self._change(partial(apply, wire.Notice(text=self._metrics.lost_notice)))
        self._change(partial(self._hangs.look, now=now))
        if self._hangs.asks(self.state, now=now):
            self._pool.send(wire.DumpStacks(run=self._pool.run))
        if self.state is not self._drawn:
            self._view_state()

    def _heed_others(self) -> None:
        """End the call where another process has asked for it (``notebook-accel stop``)."""
        how, _, seconds = self._folder.take_stop().partition(" ")
        if how == "kill":
            self.kill()
        elif how:
            self.stop(float(seconds) if seconds else None)

    def _time_out(self) -> None:
        """End the call, politely the first time, and harder each grace period after that."""
        if not self._is_time_over:
            self._is_time_over = True
            # It is not what ends a call that was stopped before, or whose ranks have all ended.
            self.timed_out = not (self._is_stopped or self.is_over)
            self.stop()
        else:
            self.press(self._num_stops)
            self._num_stops += 1
        self._deadline = time.monotonic() + self._pool.grace

    def finish(self, lost: Sequence[LostAgent]) -> None:
        """The call has ended: decide what came of it and let everybody know.

        Args:
            lost: the agents that ended before their ranks had.
        """
        if self._restarts is not None:
            if self._begins_again(self._restarts, lost):
                return
            self._restarts.close()
        try:
            with self._state_lock:
                self._set_final_state(lost)
        except Exception as error:  # in the pool's only thread: who waits would wait for ever
            self._fail_by(error)
        finally:
            self._context.run(self._view.close, self.state)
            self.curves = None
            self.ended.set()

    def _begins_again(self, restarts: Restarts, lost: Sequence[LostAgent]) -> bool:
        """Start the ranks again after a failure; False where the run has ended with it."""
        with self._state_lock:
            state = self.state
            folder = str(self._folder.path)
            verdict = judge(state, is_stopped=self._is_stopped, lost=lost, log_dir=folder)
        if verdict.failure is None or self._is_stopped or not restarts.left:
            return False
        first_line = one_line(verdict.failure.message.partition("\n")[0], _MAX_REASON)
        self._change(partial(apply, wire.Notice(text=f"{first_line}; {restarts.next_one}")))
        self._view_state()
        before = self._pool
        before.await_agents()
        try:
            restarts.begin(self)
        except Exception as error:  # in the pool's only thread; and the failure is told in any case
            text = f"the ranks could not be started again: {error}"
            with self._state_lock:
                self._pool, self.state = before, apply(wire.Notice(text=text), state)
            return False
        if self._is_stopped:  # while they came
            self._pool.kill()
        return True

    def _view_state(self) -> None:
        self._drawn = self.state
        self._context.run(self._view.update, self.state)

    def renew(self, pool: RankPool) -> None:
        """Other ranks take the place of those that have ended; the call is sent to them next."""
        with self._state_lock:
            self._pool = pool
            assert self.results is not None, "the run has not ended"
            self.results.clear()
            self._hangs = HangWatch(self._labels)
            fresh = starting(run="", name="", world_size=len(pool.processes), started=0.0)
            status = "stopping" if self._is_stopped else "starting"
            self.state = replace(self.state, ranks=fresh.ranks, hang=None, status=status)

    def _fail_by(self, error: Exception) -> None:
        """Our own code failed while it looked for what came of the call: that is told instead."""
        _log.warning("the end of run %s could not be judged", self.state.run, exc_info=error)
        failure = Failure(
            message=(
                f"the ranks have ended, but notebook_accel failed to say how: "
                f"{type(error).__name__}: {error}. What they returned is in the results of the "
                "run's handle (run.results), and what they printed in its logs"
            ),
            traceback="".join(traceback.format_exception(error)),
        )
        with self._state_lock:
            self.results = None
            self._closing_notices = lambda _: ()
            self.state = replace(
                self.state, status="failed", ended=self.state.now(), failure=failure
            )

    def _set_final_state(self, lost: Sequence[LostAgent]) -> None:
        """The final state; nobody may change it any more."""
        self._metrics.flush()
        self._metrics.close()
        verdict = judge(
            self.state,
            is_stopped=self._is_stopped,
            lost=lost,
            log_dir=str(self._folder.path),
        )
        state = replace(
            self.state, status=verdict.status, ended=self.state.now(), failure=verdict.failure
        )
        lines = [self._metrics.lost_notice] if self._metrics.lost_notice else []
        for line in (*lines, *self._closing_notices(self.state)):
            state = apply(wire.Notice(text=line), state)
        # Results may be large, and the notices' function holds objects of the notebook: from here
        # on only the run's handle keeps results.
        results, self.results = self.results, None
        self._closing_notices = lambda _: ()
        has_rescued = results is not None and results.has_rescued
        state = replace(state, has_rescued=has_rescued)
        lost_notice = self._folder.save(state)
        if results is not None and has_rescued:
            unsaved = self._folder.save_rescued(results)
            # Said only after the state was saved, which other kernels read: it is for this one.
            by_id = f"notebook_accel.find_run({self._folder.id!r}).rescued"
            later, loss = "after another launch or a restart", ""
            if unsaved:
                later, loss = "after another launch", f". A restart loses {unsaved}: save it before"
            self.rescued_as = f"{self.handle()}.rescued ({later}: {by_id}){loss}"
            state = apply(wire.Notice(text=RESCUED + self.rescued_as), state)
        if lost_notice:
            state = apply(wire.Notice(text=lost_notice), state)
        self.state = state
