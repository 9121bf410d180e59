"""What a view must do, and the view that shows nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.run import Run

__all__ = ["GuardedView", "View"]

_log = logging.getLogger(__name__)


class View:
    """Shows one run. This one shows nothing; others override what they need.

    ``update`` and ``close`` are called by the run's supervisor thread, the others by the thread
    that called the launcher.
    """

    def expect(self, name: str) -> None:
        """A run of the function ``name`` comes in some seconds: what starts ranks starts first."""

    def abandon(self) -> None:
        """No run comes: the launch failed."""

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


class GuardedView(View):
    """Another view, whose errors end no training: each kind of call logs its first one."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._told: set[str] = set()

    def expect(self, name: str) -> None:
        self._guard(self._view.expect, name)

    def abandon(self) -> None:
        self._guard(self._view.abandon)

    def open(self, run: Run) -> None:
        self._guard(self._view.open, run)

    def update(self, state: RunState) -> None:
        self._guard(self._view.update, state)

    def poll(self) -> None:
        self._guard(self._view.poll)

    def close(self, state: RunState) -> None:
        self._guard(self._view.close, state)

    def settle(self) -> None:
        self._guard(self._view.settle)

    def reopen(self, run: Run) -> None:
        self._view.reopen(run)

    def _guard(self, draw: Callable[..., None], *args: Any) -> None:
        try:
            draw(*args)
        except Exception:  # whatever a view does, the run goes on
            if draw.__name__ not in self._told:
                self._told.add(draw.__name__)
                _log.warning("the view of a run could not be drawn", exc_info=True)
