"""The stages by which a call is ended, on a person's request or after a rank failed.

No side effects here: an :class:`Ending` computes which stage is due; the agent carries it out.

    a launch     STOP -a-> INTERRUPT -grace-> TERMINATE -1 s-> KILL
    a session    STOP -a-> INTERRUPT -1 s-> DISCONNECT -grace-> TERMINATE -1 s-> KILL

    a: grace, or less if no rank makes progress for 1 s

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
is later (with fewer processors than ranks, some begin late). It lasts 2 seconds at most.
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
    """The steps that end a call, in order; each is harder on the ranks than the one before.

    NONE: nothing is done. STOP: the ranks are asked to leave their loops, all at the same point
    (``scoreboard.py``). INTERRUPT: a KeyboardInterrupt is raised in each rank. DISCONNECT: ranks
    that wait in a collective, and so have not handled the interrupt, shut down their connections to
    other ranks and abort their NCCL groups, so that the collective fails. TERMINATE: the rank
    processes get SIGTERM. KILL: they get SIGKILL.
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
    """The state of ending a call: the stage reached, and when the next one is due. Immutable.

    The agent keeps one per call. Each method returns a new state, or the stage to enter.

    Attributes:
        stage: the last stage that was entered.
        grace: seconds that ranks get before a harder stage; the call's value, unless a request
            brings another.
        is_last: whether the rank processes end after this call anyway, so that a failure of one
            rank may end the others by SIGTERM.
        has_failed: whether a rank has failed, so that the call is ended on the other ranks.
        settles_from: the earliest end of the settle window, in monotonic seconds; None while no
            window is open.
        due: when to enter ``next`` at the latest, in monotonic seconds; None for never.
        next: the stage to enter after ``stage``.
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
        """Return the state after a request to enter ``stage`` now.

        Args:
            stage: the stage. The state stays as it is if this stage or a harder one was entered
                before, and for STOP also if a rank has failed, since the failure ends the call
                sooner.
            now: monotonic seconds.
            grace: new value of the attribute ``grace``, in seconds; None keeps the old value.
        """
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
        """Return the state after a rank failed: a settle window begins, then the others are ended.

        If the rank processes are to serve more calls, the other ranks get a KeyboardInterrupt and
        the user's grace. If not (``is_last``), they get SIGTERM and soon SIGKILL. The state is
        unchanged if a rank failed before, or INTERRUPT or a harder stage was entered.
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
        """Return the state after one more rank has called the function.

        If a settle window is open, it starts anew, so that this rank gets as long as the others.
        Its longest time stays the same.
        """
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
            leaving: whether every rank in the call has left its loop, or has read ``should_stop``
                since the stop was asked; STOP then waits for the ranks without limit.
            all_settle: whether every rank in the call has called the function, and no rank's
                process is dying; only then can the settle window end before its 2 seconds are over.
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
