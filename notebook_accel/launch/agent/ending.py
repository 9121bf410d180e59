"""How a run is brought to its end: politely, then firmly, then at once.

Pure: an :class:`Ending` says what is due at a time; the agent does it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

__all__ = ["Ending", "Stage"]

# Without progress for this long, a rank that was asked politely gets a KeyboardInterrupt.
_IDLE_SECONDS = 1.0
# From SIGTERM to SIGKILL once a grace period is over.
_TERMINATE_SECONDS = 1.0
# What a failing rank's peers get to say that they lost it, and then to end.
_SETTLE_SECONDS = 0.25


class Stage(IntEnum):
    """What was done last to end the ranks."""

    NONE = 0
    STOP = 1
    INTERRUPT = 2
    TERMINATE = 3
    KILL = 4


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What was done, and when the next stage is due (monotonic seconds; None for never)."""

    stage: Stage = Stage.NONE
    grace: float = 10.0
    due: float | None = None
    term_seconds: float = _TERMINATE_SECONDS

    def ask(self, stage: Stage, *, now: float, grace: float | None = None) -> Ending:
        """Somebody asks for ``stage``; a stage that is passed already stays passed."""
        if stage <= self.stage:
            return self
        grace = self.grace if grace is None else grace
        wait = {
            Stage.STOP: grace,
            Stage.INTERRUPT: grace,
            Stage.TERMINATE: self.term_seconds,
        }.get(stage)
        return replace(self, stage=stage, grace=grace, due=None if wait is None else now + wait)

    def failed(self, *, now: float) -> Ending:
        """A rank failed: the others are ended after the settle window."""
        if self.stage >= Stage.INTERRUPT:
            return self
        due = now + _SETTLE_SECONDS
        return replace(self, stage=Stage.INTERRUPT, due=due, term_seconds=_SETTLE_SECONDS)

    def next_stage(self, *, now: float, idle: float, leaving: bool) -> Stage | None:
        """The stage that is due now.

        Args:
            now: monotonic seconds.
            idle: seconds since any rank last made progress.
            leaving: all ranks know of the stop and leave on their own.
        """
        if self.stage == Stage.STOP:
            if leaving:
                return None
            overdue = self.due is not None and now >= self.due
            return Stage.INTERRUPT if overdue or idle >= _IDLE_SECONDS else None
        if self.due is not None and now >= self.due:
            return Stage(self.stage + 1)
        return None
