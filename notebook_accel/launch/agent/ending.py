"""The stages by which a call is ended, on a person's request or after a rank failed.

Pure: an :class:`Ending` says what is due at a time; the agent does it.

    a launch     STOP -a-> INTERRUPT -grace-> TERMINATE -1 s-> KILL
    a session    STOP -a-> INTERRUPT -1 s-> DISCONNECT -grace-> TERMINATE -1 s-> KILL

    a: grace, or 1 s without progress

A person may ask for any stage at any time; each leads to the next by itself. One exception: once
every rank in the call has left its loop or has read ``should_stop``, STOP leads no further, and the
ranks go on in their own time until somebody asks again. Up to DISCONNECT the rank processes
survive, and are ready for the next call; TERMINATE and KILL end them.

When a rank fails, the others first have a settle window: where all make the same mistake, each is
to be heard, and a rank that was slower must not pass for a victim of the first. The window is over
``SETTLE_SECONDS`` after every rank has called the function: on a machine with fewer processors than
ranks, some may not have run at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from notebook_accel.launch import wire

__all__ = ["SETTLE_SECONDS", "STAGES", "Ending", "Stage"]

# Without progress for this long, a rank that was asked politely gets a KeyboardInterrupt.
_IDLE_SECONDS = 1.0
# A rank in a collective sees no KeyboardInterrupt: for this long it is left to end by itself.
_DISCONNECT_SECONDS = 1.0
# From SIGTERM to SIGKILL once a grace period is over.
_TERMINATE_SECONDS = 1.0
# Once a rank has failed: the time that the others get to fail by themselves or to say that they
# lost it, and later the time from SIGTERM to SIGKILL.
SETTLE_SECONDS = 0.25
# After it the settle window is over, also where a rank has not called the function.
_MAX_SETTLE_SECONDS = 2.0


class Stage(IntEnum):
    """The steps that end a call, from a polite stop to SIGKILL; a later one is harder.

    NONE: nothing. STOP: the ranks were asked to leave at the same step. INTERRUPT: they got a
    KeyboardInterrupt. DISCONNECT: those that had not seen it, since they wait in a collective,
    had their connections to other ranks shut down, and groups of NCCL aborted. TERMINATE, KILL: the
    signals were sent.
    """

    NONE = 0
    STOP = 1
    INTERRUPT = 2
    DISCONNECT = 3
    TERMINATE = 4
    KILL = 5


# What somebody asks for with each message.
STAGES = {
    wire.Stop: Stage.STOP,
    wire.Interrupt: Stage.INTERRUPT,
    wire.Terminate: Stage.TERMINATE,
    wire.Kill: Stage.KILL,
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The state of the end of a call: the stage reached, and when the next one is due.

    Attributes:
        stage: what was done last.
        grace: seconds between two stages: those of the call, until a Stop says others.
        is_last: whether the rank processes end after this call anyway, so that nothing in them
            is worth waiting for once one has failed.
        has_failed: whether a rank has failed, which ends the call on the others.
        settles_from: when the settle window may be over at the earliest, in monotonic seconds;
            None where there is none.
        due: when ``next`` is done, in monotonic seconds; None for never.
        next: the stage that follows.
        term_seconds: from SIGTERM to SIGKILL.
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
        """Return the ending after a request for ``stage``; unchanged if it is there already."""
        if stage <= self.stage or (stage == Stage.STOP and self.has_failed):
            # The failure ends the call sooner than a polite stop would.
            return self
        grace = self.grace if grace is None else grace
        follows = {
            Stage.STOP: (Stage.INTERRUPT, grace),
            Stage.INTERRUPT: (
                (Stage.TERMINATE, grace)
                if self.is_last
                else (Stage.DISCONNECT, min(grace, _DISCONNECT_SECONDS))
            ),
            Stage.DISCONNECT: (Stage.TERMINATE, grace),
            Stage.TERMINATE: (Stage.KILL, self.term_seconds),
        }
        if stage not in follows:
            return replace(self, stage=stage, grace=grace, due=None, settles_from=None)
        following, wait = follows[stage]
        return replace(
            self, stage=stage, grace=grace, next=following, due=now + wait, settles_from=None
        )

    def failed(self, *, now: float) -> Ending:
        """Return the ending after a rank failed: the others are ended after the settle window.

        Where the rank processes go on to other calls, the others get a KeyboardInterrupt and
        the person's grace; where they do not, SIGTERM and SIGKILL.
        """
        if self.has_failed or self.stage >= Stage.INTERRUPT:
            return self
        failed = replace(
            self,
            has_failed=True,
            settles_from=now + SETTLE_SECONDS,
            due=now + _MAX_SETTLE_SECONDS,
        )
        if not self.is_last:
            return replace(failed, next=Stage.INTERRUPT)
        # Ranks of a last call are not worth a KeyboardInterrupt: we enter INTERRUPT without sending
        # one, so that TERMINATE follows; a Stop or Interrupt asked for meanwhile is ignored.
        return replace(
            failed, stage=Stage.INTERRUPT, next=Stage.TERMINATE, term_seconds=SETTLE_SECONDS
        )

    def begun(self, *, now: float) -> Ending:
        """Return the ending after one more rank called the function: a new settle window begins."""
        return (
            self if self.settles_from is None else replace(self, settles_from=now + SETTLE_SECONDS)
        )

    def next_stage(
        self, *, now: float, idle: float, leaving: bool, all_settle: bool = True
    ) -> Stage | None:
        """Return the stage to enter now; None if none is due.

        Args:
            now: monotonic seconds.
            idle: seconds since any rank last made progress.
            leaving: every rank in the call has left its loop or has read ``should_stop``, and so
                ends the call in its own time.
            all_settle: every rank in the call has called the function, and none is dying.
        """
        is_polite = self.stage == Stage.STOP and not self.has_failed
        if is_polite and leaving:
            return None
        if is_polite and idle >= _IDLE_SECONDS:
            return Stage.INTERRUPT
        if self.settles_from is not None and all_settle and now >= self.settles_from:
            return self.next
        if self.due is not None and now >= self.due:
            return self.next
        return None
