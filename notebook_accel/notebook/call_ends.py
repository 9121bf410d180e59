"""How the calls of a session ended, as far as the next call must know it.

    about_to_send --> the call goes on; whoever sent it waits for it, or run.wait() does, or nobody
    note, before the next call is made <-- the state of the session's newest call

So nothing depends on who waited for a call, or on how that wait ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_accel.launch.launcher import Session
    from notebook_accel.launch.run import Run
    from notebook_accel.notebook.worker.calls import NamesOutcome

__all__ = ["CallEnds"]


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What a call was to do: see :meth:`CallEnds.about_to_send`."""

    renews_group: bool = False
    keeps_error: bool = False
    pushed: frozenset[str] = frozenset()


class CallEnds:
    """Notes how each call of a session has ended.

    Attributes:
        has_lost_group: whether all ranks had a process group that they have left since: the next
            cell or function call makes it anew.
        has_unreported_names: whether the ranks have names that they could not tell: a call raised.
        rank_at_fault: in the newest cell or function call that failed; None where no rank was.
    """

    def __init__(self, session: Session) -> None:
        self.has_lost_group = False
        self.has_unreported_names = False
        self.rank_at_fault: int | None = None
        self._session = session
        self._request = _Request()
        self._noted: Run | None = None
        # What went along with a call that not all ranks have returned from, and its number.
        self._unsure: tuple[int, frozenset[str]] = (0, frozenset())

    def about_to_send(
        self,
        *,
        renews_group: bool = False,
        keeps_error: bool = False,
        pushed: Iterable[str] = (),
    ) -> None:
        """A call will be sent next, unless something is wrong with it.

        Args:
            renews_group: whether it makes the process group anew.
            keeps_error: whether the ranks keep its error for ``%accelerate debug``.
            pushed: names that go along.
        """
        self._request = _Request(
            renews_group=renews_group, keeps_error=keeps_error, pushed=frozenset(pushed)
        )

    @property
    def was_sent(self) -> bool:
        """Whether what was about to be sent is on its way, or has ended."""
        return self._session.newest_call is not self._noted

    def note(self) -> None:
        """Note how the newest call ended; it has ended."""
        run = self._session.newest_call
        if run is None or not self.was_sent:
            return
        self._noted, request, state = run, self._request, run.state
        if request.keeps_error and state.failure is not None:
            self.rank_at_fault = state.failure.rank
        if state.ended_well:
            self.has_lost_group = self.has_lost_group and not request.renews_group
            return
        # A call that had no group, since it asked for names alone or raised before it made the
        # group anew, says nothing of the one before.
        self.has_lost_group = self.has_lost_group or all(rank.made_group for rank in state.ranks)
        self.has_unreported_names = True
        if request.pushed:
            self._unsure = run._conductor.number, request.pushed

    def take(self, answers: Iterable[NamesOutcome]) -> frozenset[str]:
        """All ranks have told their names; gives those that were pushed, and that not all got."""
        self.has_unreported_names = False
        (call, pushed), self._unsure = self._unsure, (0, frozenset())
        has_arrived = all(answer.last_push >= call for answer in answers)
        return frozenset() if has_arrived else pushed
