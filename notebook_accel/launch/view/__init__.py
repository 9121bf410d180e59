"""The base class of views, which show a run to the user, and the guard around every view.

A view's methods are called in this order::

    launch_is_slow -> open -> update, update, ...           -> close
                              poll, poll, ... stop_waiting  -> print_end
                   -> launch_failed

The methods of the second row are called by a thread that waits for the run, mostly the thread of
the cell. A thread may wait several times; ``stop_waiting`` is called at the end of each wait. All
calls go through :class:`GuardedView`, so that an error in a view ends no training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from notebook_accel.launch.control.run_state import RunState

_log = logging.getLogger(__name__)


class View:
    """Shows one run to the user. This class shows nothing; subclasses override what they need.

    ``run`` is a :class:`Run`, without results.

    ``update`` and ``close`` are called by the thread that receives the ranks' messages
    (control/pool.py). ``poll``, ``stop_waiting`` and ``print_end`` are called by a thread that
    waits for the run, the other methods by the thread that launches the run or shows it again. An
    inline run, whose function is called in the kernel itself, has no thread that receives messages:
    ``update`` is never called.
    """

    is_shown = False

    def launch_is_slow(self, name: str, importing: str = "") -> None:
        """Show that a run of the function ``name`` will open in some seconds.

        It is called if the template, the process from which ranks are forked, has to start first:
        the user should see that something goes on. ``open`` or ``launch_failed`` follows. Of the
        view with which a ``Session`` was started, no other method is called, since each call of the
        session has a view of its own.

        Args:
            importing: the library that is being imported for all ranks; "" while the template
                starts.
        """

    def waits_for_machines(self, text: str) -> None:
        """Show that other machines must join before a run can open, and by which command.

        It is called once more if the text changes. ``open`` or ``launch_failed`` follows; with
        ``block=False`` the run is open already.
        """

    def launch_failed(self) -> None:
        """Remove what was shown of the launch, since the launch failed and no run will open."""

    def open(self, run: Any) -> None:
        """Show a run that has just been made; its rank processes may not be running yet."""

    def update(self, state: RunState) -> None:
        """Show the changed state of the run; called at most five times a second."""

    def poll(self) -> None:
        """Show what is new; called twenty times a second by a thread that waits for the run."""

    def stop_waiting(self) -> None:
        """Stop showing that a thread waits: the run has ended, or the wait was cut short."""

    def close(self, state: RunState) -> None:
        """Show how the run has ended, with this last state; called once."""

    def print_end(self) -> None:
        """Print the end of the run, in the thread that has waited for the run.

        It is for text that this thread must print, so that the text appears in the thread's cell.
        """

    def reopen(self, run: Any) -> None:
        """Show the run once more, in the cell that now calls ``run.show()``."""

    def show_displays(self, run: Any, rank: int) -> None:
        """Show the figures and other rich output that one rank displayed (``run.show(rank)``)."""

    def charts_of(self, run: Any, names: Sequence[str]) -> Any:
        """Return charts of metrics (``run.plot()``); None where only matplotlib has a place."""


class GuardedView(View):
    """Wraps a view so that its errors end no training: the first error of each method is logged.

    Only ``reopen``, ``show_displays`` and ``charts_of`` may raise: the user asks for them
    (``run.show()``), and no run depends on them.
    """

    def __init__(self, view: View) -> None:
        self._logged: set[str] = set()
        for name in vars(View):
            if not name.startswith("_"):
                method = getattr(view, name)
                is_as_it_is = name in ("is_shown", "reopen", "show_displays", "charts_of")
                setattr(self, name, method if is_as_it_is else partial(self.guard, method))

    def guard(self, method: Callable[..., None], *args: Any) -> None:
        """Call a method of the wrapped view; catch its errors, and log the first of each method."""
        try:
            method(*args)
        except Exception:  # whatever a view does, the run goes on
            if method.__name__ not in self._logged:
                self._logged.add(method.__name__)
                _log.warning("the view of a run could not be drawn", exc_info=True)
