"""What a view must do, and the view that shows nothing.

    launch_is_slow -> open -> update, update, ...           -> close
                              poll, poll, ... stop_waiting  -> print_end
                   -> launch_failed

The methods of the second row are called by the thread that waits for the run; it may wait several
times, and ``stop_waiting`` ends each. Everybody calls a view through :class:`GuardedView`, so that
a view with a bug costs the person a picture and not the training.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.run import Run

__all__ = ["GuardedView", "View"]

_log = logging.getLogger(__name__)


class View:
    """Shows one run. This one shows nothing; others override what they need.

    ``update`` and ``close`` are called by the thread that listens to the ranks (control/pool.py),
    ``poll``, ``stop_waiting`` and ``print_end`` by a thread that waits for the run, the others by
    the one that called the launcher. An inline run has no thread of its own, and no ``update``.
    """

    def launch_is_slow(self, name: str) -> None:
        """A run of the function ``name`` will open in some seconds.

        Called where the template has to start first, so that the person sees that something goes
        on. ``open`` or ``launch_failed`` follows; a ``Session`` calls nothing else of the view that
        it was started with, since each of its calls has one of its own.
        """

    def waits_for_machines(self, text: str) -> None:
        """Other machines have to join before a run can open; ``text`` has the command for them.

        Called again as the text changes. ``open`` or ``launch_failed`` follows.
        """

    def launch_failed(self) -> None:
        """The launch failed: no run will open."""

    def open(self, run: Run) -> None:
        """The run exists; its processes may not be there yet."""

    def update(self, state: RunState) -> None:
        """The state changed. Called at most five times a second."""

    def poll(self) -> None:
        """The caller's thread waits for the run. Called twenty times a second meanwhile."""

    def stop_waiting(self) -> None:
        """The caller's thread waits no longer: the run has ended, or the wait was cut short."""

    def close(self, state: RunState) -> None:
        """The run ended with this state. Called once."""

    def print_end(self) -> None:
        """The wait has come to the run's end: print what only the caller's thread may print."""

    def reopen(self, run: Run) -> None:
        """Show the run once more, in whatever is being displayed now (``run.show()``)."""

    def show_displays(self, run: Run, rank: int) -> None:
        """Show what a rank displayed: figures and the like (``run.show(rank)``)."""


class GuardedView(View):
    """Another view, whose errors end no training: the first of each method is logged.

    ``reopen`` and ``show_displays`` may raise: the person asked for what they show
    (``run.show()``), and no run depends on it.
    """

    def __init__(self, view: View) -> None:
        self._logged: set[str] = set()
        for name in vars(View):
            if not name.startswith("_"):
                method = getattr(view, name)
                is_asked_for = name in ("reopen", "show_displays")
                setattr(self, name, method if is_asked_for else partial(self.guard, method))

    def guard(self, method: Callable[..., None], *args: Any) -> None:
        """Call a method of the view; its first error is logged."""
        try:
            method(*args)
        except Exception:  # whatever a view does, the run goes on
            if method.__name__ not in self._logged:
                self._logged.add(method.__name__)
                _log.warning("the view of a run could not be drawn", exc_info=True)
