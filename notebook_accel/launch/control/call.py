"""One call of a function on all ranks, in the notebook's kernel: from its sending to its verdict.

    Run (run.py) --asks--> Call
                             RankCall      on ranks of a pool (pool.py)
                             InlineCall    in the notebook's own process (engines/inline.py)
                             PastCall      of another kernel, read from its folder on disk
                                           (run_list.py)
                               AttachedCall  of a detached run, whose folder is read all the time
                                             (detached.py)

A call holds its newest state, which the run's handle and the views read. It is made from a
:class:`NewCall`, which the launcher prepares before any rank is started.

A :class:`RankCall` applies each message from the ranks to its state, keeps the pickled results,
writes metrics to disk, has the view draw at most five times a second, and decides at the end
whether the call succeeded, failed or was stopped. The thread of its :class:`RankPool` hands it the
messages, and calls ``tick`` several times a second; the methods that :class:`Call` defines may be
called from any of the user's threads.

A call ends in this order, in the pool's thread up to ``ended``::

    the last rank's Returned, Raised or RankEnded -> is_over
    the agents are sent CallEnded; all output of the call has arrived here
    if the ranks were started for this call alone: their processes have ended
    finish: final state (verdict, metrics file closed, state saved) -> view.close -> ended is set
    the thread that waits: view.print_end, then the run's error is raised (run.py)

If the launch fails before there is a run, none of this happens: only ``view.launch_failed`` is
called.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from notebook_accel import wire
from notebook_accel.actions.common_actions import CommonActions
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.control.curves import LiveCurves
from notebook_accel.launch.control.hang import HangWatch
from notebook_accel.launch.control.metrics_file import MetricReader, MetricStore
from notebook_accel.launch.control.pool import AgentEnd, RankPool
from notebook_accel.launch.control.results import Results, StoredResults
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.control.run_state import RESCUED, Failure, RunState, apply, starting
from notebook_accel.launch.control.stacks import crash_text, stacks_text
from notebook_accel.launch.control.verdict import Verdict, closing_advice, judge
from notebook_accel.launch.payload import PackedCall, Parcel
from notebook_accel.launch.template.handle import follow
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.system.interrupts import Latch, Presses, held

if TYPE_CHECKING:
    from notebook_accel.launch.launch_request import LaunchRequest

_log = logging.getLogger(__name__)

# Between two looks at the person's interrupts; a view's ``poll`` is called as often.
_SLICE_SECONDS = 0.05
# Five times a second looks live; a page that redraws more often makes the notebook slow.
_DRAW_SECONDS = 0.2
_OUT_OF_REACH = (
    "the ranks of this run are not this kernel's to ask; those of a launch in this kernel are, "
    "with any engine but 'inline' and without detach=True"
)
# Characters of why the ranks are started again.
_MAX_REASON = 200


@dataclass(frozen=True, kw_only=True)
class NewCall:
    """What the launcher prepares for a call before it starts ranks or sends anything."""

    request: LaunchRequest
    state: RunState
    folder: RunFolder
    metrics: MetricReader
    handle: Callable[[], str] = lambda: ""


class Call:
    """Base class of calls: one call of a function on all ranks, and its newest state.

    Most methods do nothing here; each kind of call overrides those that it supports.

    Attributes:
        results: what the ranks returned. None once the call has ended: from then on only the
            handles that the user holds keep results in memory.
        curves: curves of the metrics for the live charts, while the call goes on; else None.
        number: number of the call among those of the same rank processes, from 1 on; 0 before it
            was sent.
        can_act: whether :meth:`act` reaches the ranks.
    """

    can_act = False
    curves: LiveCurves | None = None
    was_killed = False
    number = 0

    def __init__(self, new: NewCall, *, results: Results | None = None) -> None:
        self.state = new.state
        self.config = new.request.config
        self.folder = new.folder
        self.metrics = new.metrics
        self.view = new.request.view
        self.handle = new.handle
        self.results = results
        self.ended = Latch()
        # ipykernel 7.0 needs the context of the cell for displays from a thread.
        self._context = contextvars.copy_context()

    # ---- the end -----------------------------------------------------------------------------

    def check_waiting(self) -> None:
        """Raise an error if :meth:`wait` would never end. The default raises none."""

    def wait(self, timeout: float | None = None, presses: Sequence[Presses] = ()) -> bool:
        """Wait for the end of the call; return True at its end, False if ``timeout`` passes first.

        Meanwhile the view is polled, and interrupts of the user are forwarded to the ranks.
        """
        self.check_waiting()
        deadline = None if timeout is None else time.monotonic() + timeout
        num_passed_on = 0
        # In short slices: signals and the view get their turn.
        try:
            while not self.ended.wait(_SLICE_SECONDS):
                self.view.poll()
                if num_passed_on < sum(one.count for one in presses):
                    num_passed_on += 1
                    self.press(num_passed_on)
                # Where it has ended just now, the end is still to be printed.
                is_late = deadline is not None and time.monotonic() >= deadline
                if is_late and not self.ended.is_set():
                    return False
        finally:
            self.view.stop_waiting()
        self.view.print_end()
        return True

    def stop(self, grace: float | None = None) -> None:
        """Ask all ranks to leave the call at the same batch or read of ``should_stop``.

        Returns at once. If a stop was requested before, the ranks are interrupted.
        """

    def press(self, number: int) -> None:
        """Act on the user's Ctrl-C: interrupt the ranks, or send them SIGTERM or SIGKILL."""

    def kill(self) -> None:
        """Kill the ranks now."""

    def conclude(self) -> None:
        """Show the end of the call, whose state is the final one, and set ``ended``."""
        self._context.run(self.view.close, self.state)
        # From here on only handles keep results.
        self.curves = self.results = None
        self.ended.set()

    # ---- at a common point of all ranks --------------------------------------------------------

    def act(self, action: wire.Action, *, stays: bool = False) -> Future[None]:
        """Have all ranks do an action at a common point; the future says when they have.

        Values of knobs that ``stay`` wait for a point however long it takes.
        """
        raise NotebookAccelError(f"{action.kind}: {_OUT_OF_REACH}")

    def go_on(self) -> Future[None]:
        """End a pause; the future says when all ranks train again. Raises as :meth:`act`."""
        raise NotebookAccelError(f"go_on: {_OUT_OF_REACH}")

    # ---- what it leaves ----------------------------------------------------------------------

    def stacks(self, rank: int | None = None) -> str:
        """Return the current Python stacks of one rank, or of all if ``rank`` is None, as text."""
        return "the run is not of this process\n"

    def logs(self, rank: int | None = None, max_bytes: int | None = None) -> str:
        """Return the output of one rank, or of all ranks with a label on each line.

        Args:
            max_bytes: return only about this many bytes from the end, divided equally among the
                ranks; None for everything.
        """
        if rank is not None:
            return self._log(rank, max_bytes)
        ranks = range(self.state.world_size)
        share = None if max_bytes is None else max_bytes // len(ranks)
        return "".join(labelled(one, self._log(one, share)) for one in ranks)

    def _log(self, rank: int, max_bytes: int | None) -> str:
        part = self.state.ranks[rank]
        first = part.log_start or 0
        if max_bytes is None:
            # The files of a session have what its other calls printed, too.
            whole = (first, part.log_end) if self.state.session else ()
            return self.folder.read_log(rank, *whole)
        start = max(first, part.log_end - max_bytes)
        text = self.folder.read_log(rank, start, part.log_end)
        # The text most likely begins in mid-line, so it is shown from the next line on, if there is
        # one.
        return text if start == first else text.partition("\n")[2] or text


def labelled(rank: int, text: str) -> str:
    """Return a rank's output with ``[rank N]`` before each line."""
    # Not splitlines(): a form feed ends no line.
    lines = text.removesuffix("\n").split("\n") if text else []
    return "".join(f"[rank {rank}] {line}\n" for line in lines)


class RankCall(Call):
    """A call on the rank processes of a :class:`RankPool`.

    The pool calls ``begin`` in the thread that sends the call. In its own thread it calls ``take``,
    ``lose`` and ``tick``, and ``finish`` at the end. ``note_stop`` may be called in any thread.
    """

    actions: CommonActions
    metrics: MetricStore
    can_act = True

    def __init__(
        self,
        pool: RankPool,
        packed: PackedCall,
        new: NewCall,
        *,
        start_again: Callable[[int], RankPool] | None = None,
        close: Callable[[str], object] = bool,
    ) -> None:
        """Make the call, which is not sent yet.

        Args:
            start_again: given the number of a restart, from 1 on, starts new ranks and returns
                their pool, whose thread this call starts; up to ``config.max_restarts`` times after
                a failure. None if a failure ends the run.
            close: called with the run's last status once the run has ended.
        """
        is_detached, request = new.state.detached, new.request
        super().__init__(
            new, results=StoredResults(new.folder.path) if is_detached else Results(packed.registry)
        )
        # Reentrant: a finalizer that stops the call may run in a thread that holds it.
        self._state_lock = threading.RLock()
        self._pool = pool
        self._message = wire.BeginCall(
            payload=wire.Packet(),
            grace=request.config.grace,
            keeps_error=request.keeps_error,
            by_value=is_detached,
            resume=request.resume,
            knobs=dict(request.knobs),
        )
        # Until it has been sent for the last time. The run keeps what its advice needs, and none of
        # its arguments: what the person drops while it goes on is freed.
        self._parcel: Parcel | None = packed.parcel
        advice = partial(closing_advice, models=packed.models, uses_torch=packed.uses_torch)
        self._advice = advice if request.advise else None
        timeout = new.state.timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._labels = {source.filename: source.label for source in request.sources}
        self._hangs = HangWatch(self._labels)
        self.curves = LiveCurves()
        self._start_again, self._close = start_again, close
        self._num_restarts = 0
        self._first_notices = self.state.notices
        self._verdict: Verdict | None = None
        self._is_stopped = False
        self._is_time_over = False
        self._paused_at = 0.0
        self._noted_checkpoint = ""
        self._num_stops = 0
        self._next_draw = 0.0
        self._drawn: RunState | None = None

    # ---- what the handle asks --------------------------------------------------------------

    def stop(self, grace: float | None = None) -> None:
        self._num_stops += 1
        if self._num_stops > 1:
            self.press(1)
        else:
            self._ask_end(wire.Stop, grace=grace)

    def press(self, number: int) -> None:
        ends = (wire.Interrupt, wire.Terminate)
        if number > len(ends):
            self.kill()
        else:
            self._ask_end(ends[number - 1])

    def _ask_end(self, kind: type[wire.Message], **fields: Any) -> None:
        if self.note_stop():
            self.actions.note_stop()
            self._pool.ask_end(kind, call=self.number, **fields)

    def kill(self) -> None:
        if self.note_stop():
            self._pool.kill(call=self.number)

    def stacks(self, rank: int | None = None) -> str:
        return stacks_text(self._pool.stacks(rank), self._labels)

    def note_stop(self) -> bool:
        """Record that the end of the call was requested; return False if the call has ended.

        Once every rank's part of the call has ended, a request only hurries the exit of the
        processes. It no longer changes the outcome, but prevents a restart after a failure.
        """
        with held(), self._state_lock:
            if self.state.has_ended:
                return False
            # Once every rank has ended its part, a stop only hurries the exit of the processes: the
            # call keeps its result.
            # Of one that failed and may begin again, there is more to come.
            has_result = self.is_over and (self._start_again is None or self.state.ended_well)
            self._is_stopped = self._is_stopped or not has_result
            if self.state.status in ("starting", "running", "paused"):
                self.state = replace(self.state, status="stopping")
            return True

    def act(self, action: wire.Action, *, stays: bool = False) -> Future[None]:
        return self.actions.ask(action, stays=stays)

    def go_on(self) -> Future[None]:
        return self.actions.go_on()

    def note_pause(self, is_paused: bool) -> None:
        """Show that all ranks are paused, or train again; a pause does not count for timeout."""
        now = time.monotonic()
        seconds = 0.0 if is_paused else now - self._paused_at
        self._paused_at = now
        if self._deadline is not None:
            self._deadline += seconds
        before, after = ("running", "paused") if is_paused else ("paused", "running")
        with held(), self._state_lock:
            self.state = replace(self.state, paused_seconds=self.state.paused_seconds + seconds)
            if self.state.status == before:
                self.state = replace(self.state, status=after)
                self.folder.save(self.state)  # for other kernels and the command line

    # ---- its sending

    @contextlib.contextmanager
    def sent(self, *, last: bool) -> Iterator[None]:
        """Send the call to the ranks, and run the block in which the launcher opens its run.

        Messages from the ranks are handled only after the block, when the run and its view exist.
        Within the block the run can already be stopped or killed.

        Args:
            last: True if the ranks were started for this call alone and end after it; the pool's
                thread is then started at the end of the block. False for a call of a session.
        """
        pool = self._pool
        self._message = msgspec.structs.replace(self._message, last=last)
        with pool.paused():
            pool.check_free()
            try:
                self._send(pool)
                yield
            except BaseException:
                # A session's other calls are not ours to end: kill only if this call was sent (it
                # has a number then), or the ranks exist for it alone.
                if self.number or last:
                    self.kill()
                self._drop_parcel()
                self._close("failed")
                raise
            finally:
                # Also where the run could not be opened: without its thread nobody sees the ranks
                # end.
                if last:
                    pool.start()

    def _send(self, pool: RankPool) -> None:
        assert self._parcel is not None, "sent for the last time"
        message = msgspec.structs.replace(self._message, payload=self._parcel.packet)
        pool.send_call(self, message, self._parcel.fds)
        if self._start_again is None and not pool.is_awaited:
            self._drop_parcel()

    def move_to(self, pool: RankPool) -> None:
        """Send the call to other ranks, which take the place of those before."""
        try:
            with self._state_lock:
                self._pool = pool
                assert self.results is not None, "the run has not ended"
                self.results.clear()
                self._hangs = HangWatch(self._labels)
                fresh = starting(run="", name="", world_size=len(pool.processes), started=0.0)
                status = "stopping" if self._is_stopped else "starting"
                self.state = replace(self.state, ranks=fresh.ranks, hang=None, status=status)
            self._send(pool)
        except BaseException:
            pool.kill()
            raise
        finally:
            pool.start()
        if self._is_stopped:  # while they came
            pool.kill()

    def show_notices(self, *texts: str) -> None:
        """Show these lines below those that the run began with, in place of any others."""
        self._change(lambda state: replace(state, notices=(*self._first_notices, *texts)))

    def show_wait(self, text: str) -> None:
        """Show what the run waits for, also among its notices."""
        self.show_notices(text)
        self._context.run(self.view.waits_for_machines, text)

    def end_unstarted(self, why: str) -> None:
        """End the call, whose ranks were never started: it failed or, if ``why`` is "", stopped."""
        self.show_notices()
        failure, status = (
            (Failure(message=why, is_of_start=True), "failed") if why else (None, "stopped")
        )
        self._verdict = Verdict(status=status, failure=failure)
        ranks = [replace(rank, status=status, ended=time.time()) for rank in self.state.ranks]
        self._change(lambda state: replace(state, ranks=tuple(ranks)))
        self.finish(())

    def _drop_parcel(self) -> None:
        if self._parcel is not None:
            self._parcel.close()
            self._parcel = None

    # ---- what the pool calls: `begin` in the launching thread, the rest in its own

    def begin(self, number: int) -> None:
        self.number = number
        ranks = (
            replace(rank, pid=process.pid, agent=process.agent)
            for rank, process in zip(self.state.ranks, self._pool.processes, strict=True)
        )
        self.state = replace(self.state, ranks=tuple(ranks))
        self.actions = CommonActions(self._post, self._pool.agents, self.note_pause)

    def _post(self, kind: type[wire.Message], /, **fields: Any) -> None:
        self._pool.send(kind(run=self._pool.run, call=self.number, **fields))

    @property
    def is_over(self) -> bool:
        return all(rank.has_ended for rank in self.state.ranks)

    def take(self, message: wire.Message, fds: Sequence[int]) -> None:
        if isinstance(message, wire.Returned) and message.rank is not None:
            assert self.results is not None, "nothing comes after the end"
            self.results.keep(message.rank, message.value, list(fds))
            fds = ()
        elif isinstance(message, wire.Raised) and message.rescued and message.rank is not None:
            assert self.results is not None, "nothing comes after the end"
            parts = self.results.parts
            parts[message.rank] = self.results.unpacked(message.rescued, list(fds))
            fds = ()
        for fd in fds:
            # Only results bring descriptors. Others come from code in the rank that wrote to its
            # channel.
            os.close(fd)
        if isinstance(message, wire.Metrics):
            self.metrics.add(message.metrics)
            for metric in message.metrics:
                if self.curves is not None and metric.rank is not None:
                    self.curves.add(metric.rank, metric.step, metric.values)
        elif isinstance(message, (wire.Stacks, wire.Collectives)):
            self._hangs.take(message)
        elif isinstance(message, wire.Imported):
            follow(map(wire.ImportItem, message.names))
        elif isinstance(message, wire.RankEnded) and message.stack:
            stack = crash_text(message.stack, self._labels)
            message = msgspec.structs.replace(message, stack=stack)
        self._change(partial(apply, message))

    def lose(self, ranks: Sequence[int]) -> None:
        """Mark the given ranks as failed, unless they have ended already: their agent is gone."""

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
        """Replace the state by ``change(state)``; a stop requested during the change is kept."""
        with self._state_lock:
            before = self.state
            state = change(before)
            if self.state.status == "stopping" and not state.has_ended:
                # A finalizer has stopped the call meanwhile, in this very thread (`note_stop`).
                state = replace(state, status="stopping")
            self.state = state

    def tick(self) -> None:
        """Check the timeout and, at most five times a second, do all other regular work.

        That is: obey stop requests of other processes, write metrics to disk, look for a hang, and
        update the view if the state has changed.
        """
        self.actions.look()
        now = time.monotonic()
        is_paused = self.state.status == "paused"
        if self._deadline is not None and now >= self._deadline and not is_paused:
            self._time_out()
        if now < self._next_draw:
            return
        self._next_draw = now + _DRAW_SECONDS
        # What another process has asked for.
        if (seconds := self.folder.take("stop")) is not None:
            self.stop(float(seconds) if seconds else None)
        if self.folder.take("interrupt") is not None:
            self.press(1)
        if self.folder.take("kill") is not None:
            self.kill()
        if self.state.checkpoint != self._noted_checkpoint:  # should this kernel be killed
            self._noted_checkpoint = self.state.checkpoint
            self.folder.save(self.state)
        self.metrics.flush()
        if self.metrics.lost_notice:
            self._change(partial(apply, wire.Notice(text=self.metrics.lost_notice)))
        self._change(partial(self._hangs.look, now=now))
        if self._hangs.asks(self.state, now=now):
            self._pool.send(wire.DumpStacks(run=self._pool.run))
        if self.state is not self._drawn:
            self._view_state()

    def _time_out(self) -> None:
        """Take the next step to end the call after its timeout.

        The steps are: ask the ranks to stop (left out if the user has asked before), interrupt
        them, send SIGTERM, send SIGKILL. They are a grace period apart.
        """
        if not self._is_time_over:
            self._is_time_over = True
            # It is not what ends a call that was stopped before, or whose ranks have all ended.
            timed_out = not (self._is_stopped or self.is_over)
            self._change(lambda state: replace(state, timed_out=timed_out))
            self.stop()
        else:
            self.press(self._num_stops)
            self._num_stops += 1
        self._deadline = time.monotonic() + self._pool.grace

    def finish(self, lost: Sequence[AgentEnd]) -> None:
        """End the call: decide its verdict, draw the end, and set ``ended``.

        If the call has failed and may be restarted, it goes on with new ranks instead.
        """
        self.actions.end("the run has ended")
        if self._verdict is None and self._begins_again(lost):
            return
        self._drop_parcel()
        try:
            with self._state_lock:
                self._set_final_state(lost)
        except Exception as error:  # in the pool's only thread: who waits would wait for ever
            self._fail_by(error)
        finally:
            self._close(self.state.status)
            self.conclude()

    def _begins_again(self, lost: Sequence[AgentEnd]) -> bool:
        """Restart the ranks if the call failed and a restart is left; return whether it did."""
        if self._start_again is None:
            return False
        with self._state_lock:
            state, verdict = self.state, self._judged(lost)
        most, number = self.config.max_restarts, self._num_restarts + 1
        if verdict.failure is None or self._is_stopped or number > most:
            return False
        first_line = one_line(verdict.failure.message.partition("\n")[0], _MAX_REASON)
        text = f"{first_line}; the ranks are started again, {number} of {most} times"
        self._change(partial(apply, wire.Notice(text=text)))
        self._view_state()
        before = self._pool
        before.await_agents()
        try:
            self._num_restarts = number
            if self._message.resume and state.checkpoint:  # further than the one it began with
                self._message = msgspec.structs.replace(self._message, resume=state.checkpoint)
            self.move_to(self._start_again(number))
        except Exception as error:  # in the pool's only thread; and the failure is told in any case
            text = f"the ranks could not be started again: {error}"
            with self._state_lock:
                self._pool, self.state = before, apply(wire.Notice(text=text), state)
            return False
        return True

    def _view_state(self) -> None:
        self._drawn = self.state
        self._context.run(self.view.update, self.state)

    def _fail_by(self, error: Exception) -> None:
        """Set the final state to "failed", since judging the run's end raised ``error``."""
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
            self.state = replace(
                self.state, status="failed", ended=self.state.now(), failure=failure
            )

    def _judged(self, lost: Sequence[AgentEnd]) -> Verdict:
        folder = str(self.folder.path)
        return judge(self.state, is_stopped=self._is_stopped, lost=lost, log_dir=folder)

    def _set_final_state(self, lost: Sequence[AgentEnd]) -> None:
        """Set the final state by the verdict; save this state and the rescued training state."""
        self.metrics.flush()
        self.metrics.close()
        verdict = self._verdict or self._judged(lost)
        state = replace(
            self.state, status=verdict.status, ended=self.state.now(), failure=verdict.failure
        )
        results = self.results
        assert results is not None, "nothing comes after the end"
        # Results may be large: from here on only the run's handle keeps them.
        self.results = None
        lines = [self.metrics.lost_notice, *results.lost]
        if self._advice is not None:
            lines += self._advice(self.state)
        if len({state.ranks[rank].steps for rank in results.parts}) > 1:
            results.parts.clear()
            lines.append("what was being trained is not kept: the ranks were within a step")
        for line in filter(None, lines):
            state = apply(wire.Notice(text=line), state)
        results.end_call()
        state = replace(state, has_rescued=results.has_rescued)
        lost_notice = "" if state.detached else self.folder.save(state)
        if results.has_rescued:
            unsaved = self.folder.save_rescued(results.rescued_bytes, results.rescued)
            loss = f". A restart loses {unsaved}: save it before" if unsaved else ""
            rescued_as = f"{self.handle().rpartition('notebook_accel.')[2]}.rescued{loss}"
            # Said only after the state was saved, which other kernels read: it is for this one,
            # unless any may attach.
            state = apply(wire.Notice(text=RESCUED + rescued_as), state)
            state = replace(state, rescued_as=rescued_as)
        if state.detached:
            lost_notice = self.folder.save(state)
        if lost_notice:
            state = apply(wire.Notice(text=lost_notice), state)
        self.state = state
