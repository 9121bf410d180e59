"""What a view must do, and the view that shows nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accel.launch.run import Run
    from notebook_accel.launch.state import RunState

__all__ = ["View"]


class View:
    """Shows one run. This one shows nothing; others override what they need.

    ``update`` and ``close`` are called by the run's supervisor thread, the others by the thread
    that called the launcher.
    """

    def open(self, run: Run) -> None:
        """The run exists; none of its processes does yet."""

    def update(self, state: RunState) -> None:
        """The state changed. At most five times a second."""

    def poll(self) -> None:
        """The caller's thread is waiting for the run: called every tenth of a second."""

    def close(self, state: RunState) -> None:
        """The run ended with this state. Called once."""

    def settle(self) -> None:
        """The caller's thread stops waiting: print what only that thread may print."""

    def reopen(self, run: Run) -> None:
        """Show the run once more, in whatever is being displayed now (``run.show()``)."""
