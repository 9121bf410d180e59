"""What the handle of a run asks of whoever conducts the run, however its ranks came about."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accel.launch.control.curves import LiveCurves
    from notebook_accel.launch.control.results import Results
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.system.interrupts import Latch

__all__ = ["Conductor"]


class Conductor:
    """What conducts a run and knows how it stands; a :class:`Run` asks it for everything.

    Attributes:
        state: the newest state.
        results: what the ranks return; None once the run has ended, when only handles have it.
        ended: set once the run has ended and the view has drawn its end.
        timeout: seconds after which the run is ended; None for never.
        timed_out: whether that has ended it.
        curves: its metrics while it goes on; None where nobody collects them.
        number: of the call among those of its ranks; 0 before it was sent.
        rescued_as: what a person types for what was being trained when it was stopped; "" where
            nothing of it is kept.
    """

    state: RunState
    curves: LiveCurves | None = None
    results: Results | None = None
    ended: Latch
    timeout: float | None = None
    timed_out = False
    number = 0
    rescued_as = ""

    def handle(self) -> str:
        """What a person types for the run now: a launch that raised gave nobody its handle."""
        return ""

    def check_waiting(self) -> None:
        """Refuse to wait for an end of which this process will never hear.

        Raises:
            NotebookAccelError: the run goes on in another process.
        """

    def stop(self, grace: float | None = None) -> None:
        """Ask the ranks to leave."""

    def press(self, number: int) -> None:
        """The person interrupted once more: 1 interrupts, 2 terminates, 3 kills."""

    def kill(self) -> None:
        """End the ranks now."""

    def stacks(self, rank: int | None = None) -> str:
        """Where the ranks' Python stands."""
        return ""
