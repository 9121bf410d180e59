"""The stages by which a call is ended, on a person's request or after a rank failed.

No side effects here: an :class:`Ending` computes which stage is due; the agent carries it out.

    STOP -a-> INTERRUPT -1 s-> DISCONNECT -rest of grace-> TERMINATE -1 s-> KILL
    ALIGN -b-> INTERRUPT -> ...  (asked for as INTERRUPT, where collectives are asynchronous)

    a: no rank makes progress any more (StepClock); or grace, if none is on its way to a point
       (a batch, a step, a read of should_stop) at which it hears the stop
    b: all ranks have come to the point; none makes progress for two seconds; or grace

A launch runs one call, after which its rank processes end; a session keeps them for more calls.
``grace`` is the number of seconds, set by the user, that ranks get to clean up before a harder
stage.

A person may ask for any stage at any time; each stage leads to the next by itself. One exception:
once every rank in the call has left its training loop or has read ``should_stop``, STOP leads no
further, and the ranks take as long as they need, unless the user asks for a harder stage. Up to
DISCONNECT the rank processes survive, and are ready for the next call; TERMINATE and KILL end them.

When a rank fails, the others first get a settle window. If all ranks make the same mistake, each
reports its own error in that time, instead of being ended because of the first one. The window
closes ``SETTLE_SECONDS`` after the failure, or after the last rank has called the function if that
is later (with fewer processors than ranks, some begin late); not while the report of an error is
on its way. It lasts 5 seconds at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import IntEnum

from notebook_accel import wire

# A rank that was asked politely makes no progress if it has counted nothing for this many times its
# longest recent step, and for this long at least; in its first step, for longer; a rank that has
# counted nothing at all, for less.
_STEPS = 3
_IDLE_SECONDS = 5.0
_IDLE_SECONDS_IN_FIRST_STEP = 60.0  # it may compile, and how long steps take is not known yet
_IDLE_SECONDS_WITHOUT_STEPS = 1.0
# Counts (a batch, a step, a read) from which "recent" is taken. A loop that is on its way to the
# point at which it hears the stop makes fewer; one that makes more does not hear it.
_RECENT = 20
_HEARS_WITHIN = 8
# The same for ranks that an interrupt brings to one point.
_ALIGN_SECONDS = 2.0
# A rank in a collective sees no KeyboardInterrupt: for this long it is left to end by itself.
_DISCONNECT_SECONDS = 1.0
# From SIGTERM to SIGKILL once a grace period is over.
_TERMINATE_SECONDS = 1.0
# Once a rank has failed: the time that the others get to fail by themselves or to say that they
# lost it, and later the time from SIGTERM to SIGKILL.
SETTLE_SECONDS = 0.25
# After it the settle window is over, also where a rank has not called the function.
_MAX_SETTLE_SECONDS = 5.0


class Stage(IntEnum):
    """The steps that end a call, in order; each is harder on the ranks than the one before.

    NONE: nothing is done. STOP: the ranks are asked to leave their loops, all at the same point
    (``scoreboard.py``). ALIGN: the same, but they leave by KeyboardInterrupt. INTERRUPT: a
    KeyboardInterrupt is raised in each rank that has not had one. DISCONNECT: ranks that wait in a
    collective or for their device shut down their connections to other ranks and abort their NCCL
    groups, so that the wait ends. TERMINATE: the rank processes get SIGTERM. KILL: they get
    SIGKILL.
    """

    NONE = 0
    STOP = 1
    ALIGN = 2
    INTERRUPT = 3
    DISCONNECT = 4
    TERMINATE = 5
    KILL = 6


# What somebody asks for with each message.
STAGES = {
    wire.Stop: Stage.STOP,
    wire.Interrupt: Stage.INTERRUPT,
    wire.Terminate: Stage.TERMINATE,
    wire.Kill: Stage.KILL,
}


class StepClock:
    """How long the steps of one rank take in a call, from the changes of its counters.

    Attributes:
        step: seconds of the longest recent step; 0 before the first one has ended.
    """

    def __init__(self, now: float) -> None:
        self._counts = (0, 0, 0)
        self._changed = now
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._num_changes = self._num_at_stop = 0

    def note(self, counts: tuple[int, int, int], now: float, *, is_paused: bool = False) -> None:
        """Take the rank's counts of batches, optimizer steps and reads of ``should_stop``."""
        if counts == self._counts:
            # A pause is no part of the step in which it is.
            self._changed = now if is_paused else self._changed
            return
        if any(self._counts):
            self._recent.append(now - self._changed)
        self._counts, self._changed = counts, now
        self._num_changes += 1

    @property
    def step(self) -> float:
        return max(self._recent, default=0.0)

    @property
    def is_in_first_step(self) -> bool:
        return any(self._counts) and not self._recent

    def stop_asked(self) -> None:
        """Count from now on the changes after the stop was asked."""
        self._num_at_stop = self._num_changes

    @property
    def hears(self) -> bool:
        """Whether the rank has points at which it hears a stop, and may not have come to one."""
        return any(self._counts) and self._num_changes - self._num_at_stop < _HEARS_WITHIN

    def is_stuck(self, now: float, *, since: float, grace: float | None) -> bool:
        """Return whether the rank makes no progress."""
        batches, steps, reads = self._counts
        idle = _IDLE_SECONDS_IN_FIRST_STEP if self.is_in_first_step else _IDLE_SECONDS
        idle = _ALIGN_SECONDS if grace is None else max(idle, grace if reads else 0.0)
        limit = max(idle, _STEPS * self.step)
        if not (batches or steps or reads):
            limit = _IDLE_SECONDS_WITHOUT_STEPS
        return now - max(self._changed, since) >= limit


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The state of ending a call: the stage reached, and when the next one is due. Immutable.

    The agent keeps one per call. Each method returns a new state, or the stage to enter.

    Attributes:
        term_seconds: seconds from SIGTERM to SIGKILL.
    """

    stage: Stage = Stage.NONE
    grace: float = 0.0
    is_last: bool = True
    has_failed: bool = False
    settles_from: float | None = None
    due: float | None = None
    next: Stage = Stage.NONE
    term_seconds: float = _TERMINATE_SECONDS

    def ask(self, stage: Stage, *, now: float, grace: float | None = None) -> Ending:
        """Return the state after a request to enter ``stage`` now."""
        if stage <= self.stage or (stage == Stage.STOP and self.has_failed):
            # The failure ends the call sooner than a polite stop would.
            return self
        grace = self.grace if grace is None else grace
        stuck_seconds = min(grace, _DISCONNECT_SECONDS)
        follows = {
            Stage.STOP: (Stage.INTERRUPT, grace),
            Stage.ALIGN: (Stage.INTERRUPT, grace),
            Stage.INTERRUPT: (Stage.DISCONNECT, stuck_seconds),
            Stage.DISCONNECT: (Stage.TERMINATE, grace - stuck_seconds),
            Stage.TERMINATE: (Stage.KILL, self.term_seconds),
        }
        if stage not in follows:
            return replace(self, stage=stage, grace=grace, due=None, settles_from=None)
        following, wait = follows[stage]
        return replace(
            self, stage=stage, grace=grace, next=following, due=now + wait, settles_from=None
        )

    def failed(self, *, now: float) -> Ending:
        """Return the state after a rank failed: a settle window begins, then the others are ended.

        If the rank processes are to serve more calls, the other ranks get a KeyboardInterrupt and
        the user's grace. If not (``is_last``), they get SIGTERM and soon SIGKILL. The state is
        unchanged if a rank failed before, or ALIGN or a harder stage was entered.
        """
        if self.has_failed or self.stage >= Stage.ALIGN:
            return self
        failed = replace(
            self, has_failed=True, settles_from=now + SETTLE_SECONDS, due=now + _MAX_SETTLE_SECONDS
        )
        if not self.is_last:
            return replace(failed, next=Stage.INTERRUPT)
        # Ranks of a last call are not worth a KeyboardInterrupt: we enter INTERRUPT without sending
        # one, so that TERMINATE follows; a Stop or Interrupt asked for meanwhile is ignored.
        return replace(
            failed, stage=Stage.INTERRUPT, next=Stage.TERMINATE, term_seconds=SETTLE_SECONDS
        )

    def begun(self, *, now: float) -> Ending:
        """Return the state after one more rank has called the function.

        If a settle window is open, it starts anew, so that this rank gets as long as the others.
        Its longest time stays the same.
        """
        return (
            self if self.settles_from is None else replace(self, settles_from=now + SETTLE_SECONDS)
        )

    def next_stage(
        self,
        *,
        now: float,
        leaving: bool,
        stuck: bool = False,
        hears: bool = False,
        all_settle: bool = True,
    ) -> Stage | None:
        """Return the stage to enter now; None if none is due.

        Args:
            all_settle: whether every rank in the call has called the function, none has raised
                whose error is still to come, and no rank's process is dying; only then can the
                settle window end before its 5 seconds are over.
        """
        is_polite = self.stage == Stage.STOP and not self.has_failed
        if is_polite and leaving:
            return None
        if (is_polite and stuck) or (self.stage == Stage.ALIGN and (stuck or leaving)):
            return Stage.INTERRUPT
        if is_polite and hears:
            return None
        if self.settles_from is not None and all_settle and now >= self.settles_from:
            return self.next
        if self.due is not None and now >= self.due:
            return self.next
        return None
