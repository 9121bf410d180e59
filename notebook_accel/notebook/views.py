"""Choose how a run is shown, by the names that ``notebook_launcher`` takes."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython

from notebook_accel.config.checks import shown
from notebook_accel.errors import ConfigError
from notebook_accel.launch import run_list
from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.run import Run
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view import View
from notebook_accel.launch.view.plain import PlainOnDemand, PlainView
from notebook_accel.notebook import clicks
from notebook_accel.notebook.comparison import snapshot_of
from notebook_accel.notebook.dashboard import Dashboard
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.rank_displays import OnDemand, RankDisplays
from notebook_accel.render.snapshot import render_line, render_slim

# ---- A run in a notebook that a program executes: plain lines, and the summary as HTML.


class Transcript(OnDemand, PlainView):
    """Prints lines as :class:`PlainView` does, and shows the summary as HTML, without widgets.

    For notebooks that a program executes, and for ``view="text"``. If the cell does not wait, the
    summary has a slot in its output from the start, with the ranks' output and displays.
    """

    def __init__(self, *, waits: bool = True, is_cell: bool = False) -> None:
        super().__init__(is_cell=is_cell)
        self._slot = DisplaySlot()
        self._displays = RankDisplays()
        self._waits = waits

    def open(self, run: Run) -> None:
        super().open(run)
        if not self._waits:
            self._slot.show({"text/plain": f"{run.name}: running"})

    def close(self, state: RunState) -> None:
        if self._run is not None and not self._waits:
            self._slot.show(snapshot_of(self._run, state, with_displays=True).bundle)

    def poll(self) -> None:
        super().poll()
        if self._run is not None and self._waits:
            self._displays.show_new(self._run.state)

    def print_output(self, run: Run, state: RunState) -> None:
        if self._waits:
            super().print_output(run, state)

    def print_summary(self, run: Run) -> None:
        if not self._waits:
            return
        if self.is_short_cell(run):
            snapshot = render_slim(run.state, with_output=False)
        else:
            snapshot = snapshot_of(run, run.state, with_output=False)
        self._displays.show_new(run.state)
        self._slot.show(snapshot.bundle)


# ---- The view of a run where pages draw nothing between cells (Colab).


class CellDashboard(Dashboard):
    """A :class:`Dashboard` for Colab, whose pages draw nothing that is sent while no cell runs.

    The thread of a cell that waits draws it, into that cell's output; until then it is one line.
    """

    # The number of the newest cell that shows the run.
    _placed_in: int | None = None

    def _begin_drawing(self) -> None:
        assert self._run is not None, "a view that draws is open"
        self._is_drawing = True
        # A click has no cell.
        self._placed_in = _number_of_cell() if self._has_own_slot else None
        name = one_line(self._run.state.name, 60)
        typed = run_list.expression(self._run.id)
        text = (
            f"{name}: running"
            if self._waits
            else f"{name}: runs in the background. {typed}.wait() in a cell shows it live, "
            ".show() how it stands then"
        )
        self._slot.show(render_line(text).bundle)

    def draw(self) -> None:
        self._place_in_cell()
        super().draw()

    def print_end(self) -> None:
        self._place_in_cell()
        # What another thread has sent may come after the end of this cell.
        self._slot.send_again()
        super().print_end()

    def _place_in_cell(self) -> None:
        if self._placed_in != _number_of_cell():
            self._placed_in = _number_of_cell()
            self._slot.place()


def _number_of_cell() -> int | None:
    number: int | None = getattr(get_ipython(), "execution_count", None)
    return number


def dashboard_in(
    kernel: Any, *, waits: bool = True, is_cell: bool = False, slot: DisplaySlot | None = None
) -> Dashboard:
    """Return the live panel that works in the pages of ``kernel``."""
    way = clicks.clicks_for(kernel)
    kind = Dashboard if way.draws_between_cells else CellDashboard
    return kind(way, waits=waits, is_cell=is_cell, slot=slot)


def choose_view(view: str | View, *, waits: bool = True, is_cell: bool = False) -> View:
    """Make the view for this kernel or terminal; ConfigError if it cannot be shown here.

    ``view`` is a name that ``notebook_launcher`` takes, or a view that is made already.
    """
    if isinstance(view, View):
        return view
    kernel = clicks.find_kernel()
    draws_updates = clicks.draws_updates(kernel)
    if view == "auto" or (view == "widgets" and not draws_updates):
        is_watched = kernel is not None and clicks.can_answer(kernel) and draws_updates
        view = "widgets" if is_watched else "text"
    if view == "none":
        return PlainOnDemand() if kernel is None else OnDemand()
    if view == "text" and kernel is None:
        return PlainView(is_cell=is_cell)
    if view == "text":
        # Where no updates are drawn, the cell that waits for a background run has its output.
        return Transcript(waits=waits or not draws_updates, is_cell=is_cell)
    if view != "widgets":
        raise ConfigError(f"view={shown(view)}: expected one of 'auto', 'widgets', 'text', 'none'")
    if kernel is None:
        raise ConfigError(
            "view='widgets': this code does not run in a notebook's kernel, which widgets need; "
            "take view='text'"
        )
    return dashboard_in(kernel, waits=waits, is_cell=is_cell)
