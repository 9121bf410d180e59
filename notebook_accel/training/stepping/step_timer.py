"""Where the time of a training step goes, measured in the rank while it trains.

The time between two marks belongs to one part of the step::

    the loader is asked           rest ends
    it gives a batch              data ends
    backward begins               forward ends (rest, where no prepared loader gave a batch)
    backward ends                 backward ends; by then it has waited for the other ranks
    the optimizer's step begins   rest ends
    it ends                       optimizer ends, and the parts are added to the sums

A mark reads a clock and adds a number. How long backward waits for other ranks, and on an
accelerator also how long the device has nothing to compute while a batch is read, is measured in
some steps only, for the steps since as well. A device runs behind the host: its events are read in
the first later step by whose end they have passed, never by a wait.

A pass over a loader without a step, such as a validation, is no part of a step. The first step of a
call is not measured, as much is made in it for the first time.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch

from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import RankContext, current
from notebook_accel.training.processes import devices

# The order of `wire.StepTimes`: two sums over whole steps, the parts of a step, two waits.
_NUM_STEPS, _TOTAL, DATA, FORWARD, BACKWARD, OPTIMIZER, REST, _COLLECTIVES, _DATA_WAIT = range(9)
# Between two steps with events, and between two reports of the sums.
_SAMPLE_NS = 50_000_000
# The sums are halved when they are so long: they speak of the last minute or so.
_WINDOW_NS, _MIN_STEPS = 60_000_000_000, 20


class StepTimer:
    """Measures the parts of this rank's training steps, and reports their sums."""

    def __init__(self, context: RankContext, device: torch.device) -> None:
        self._context = context
        self._clock = devices.EventClock(device)
        self._is_host = self._clock.is_host
        self._begin_call()
        self._call = -1  # so that the first step begins anew

    def _begin_call(self) -> None:
        self._call = self._context.call
        # Also with the parts of the step under way, and as they were after the last whole step.
        self._sums = [0] * 9
        self._whole = self._sums[:]
        # Steps since the device was measured, and what this was: a part, and its begin and end.
        self._num_unread = 0
        self._events: list[tuple[int, Any, Any]] = []
        self._is_sampled, self._next_sample = False, 0
        self._begun: dict[int, Any] = {}
        self.drop()

    def drop(self) -> None:
        """Forget the time since the last step."""
        self._has_batch = False
        self._begun.clear()
        self._sums[:] = self._whole
        self._last = self._step_begun = perf_counter_ns()

    def mark(self, part: int) -> None:
        """Add the time since the last mark to a part of the step."""
        now = perf_counter_ns()
        self._sums[part] += now - self._last
        self._last = now

    def ask_for_batch(self) -> None:
        """Note that the loader begins to read a batch."""
        self.mark(REST)
        if self._is_sampled and not self._is_host:
            self._begun[_DATA_WAIT] = self._clock.now()

    def get_batch(self) -> None:
        """Note that the loader has read a batch."""
        self.mark(DATA)
        self._has_batch = True
        if self._begun:
            self._end_event(_DATA_WAIT)

    def backward(self, loss: torch.Tensor | None = None) -> StepTimer:
        """Return the context manager in which a strategy runs backward."""
        self.mark(FORWARD if self._has_batch else REST)
        has_peers = self._context.world_size > 1
        if self._is_sampled and has_peers and loss is not None and loss.grad_fn is not None:
            # The first that is queued in a backward runs first at its end. What waits for other
            # ranks, as DDP and `fully_shard` do, is queued in its course.
            def note_end() -> None:
                self._begun[_COLLECTIVES] = self._clock.now()

            loss.register_hook(  # type: ignore[no-untyped-call]
                lambda _: of_torch.at_end_of_backward(note_end)
            )
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.mark(BACKWARD)
        if self._begun:
            self._end_event(_COLLECTIVES)

    def _end_event(self, part: int) -> None:
        begin, end = self._begun.pop(part, None), self._clock.now()
        if begin is not None and end is not None:
            self._events.append((part, begin, end))

    def end_step(self) -> None:
        """Note that the optimizer's step has ended."""
        self.mark(OPTIMIZER)
        if self._call != self._context.call:
            self._begin_call()
            return
        sums, now = self._sums, self._last
        sums[_NUM_STEPS] += 1
        sums[_TOTAL] += now - self._step_begun
        self._step_begun = now
        self._num_unread += 1
        if self._is_host:
            sums[_DATA_WAIT] = sums[DATA]
        if sums[_TOTAL] > _WINDOW_NS and sums[_NUM_STEPS] >= _MIN_STEPS:
            sums[:] = [spent // 2 for spent in sums]
        self._is_sampled = self._has_read_events() and now >= self._next_sample
        self._whole[:] = sums
        if self._is_sampled:
            self._next_sample = now + _SAMPLE_NS
            self._context.note_step_times(self._whole)

    def _has_read_events(self) -> bool:
        """Add what the events of a step say, for all steps since; False if the device is behind."""
        for part, begin, end in reversed(self._events):  # if the last has passed, all have
            spent = self._clock.elapsed(begin, end)
            if spent is None:
                return False
            spent *= self._num_unread
            if self._is_host:  # on the host it is a part of backward
                spent = min(spent, self._sums[BACKWARD])
                self._sums[BACKWARD] -= spent
            self._sums[part] += spent
        if self._events:
            self._events, self._num_unread = [], 0
        return True


class NoTimer(StepTimer):
    """Reads no clock: in a process that was not launched nobody sees the times."""

    def mark(self, part: int) -> None:
        pass

    def end_step(self) -> None:
        pass


def start_timer(context: RankContext, device: torch.device) -> StepTimer:
    """Return a new timer of a rank's steps on a device, which :func:`step_timer` finds."""
    kind = StepTimer if context.launched else NoTimer
    timer = context.shared[StepTimer] = kind(context, device)
    return timer


def step_timer(context: RankContext | None = None) -> StepTimer:
    """Return what measures the steps of the rank of ``context``; None takes the current rank."""
    context = context or current()
    timer: StepTimer | None = context.shared.get(StepTimer)
    return start_timer(context, devices.HOST) if timer is None else timer
