"""A run in a notebook that a program executes: plain lines, and the summary as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.launch.view.plain import PlainView
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.rank_displays import RankDisplays, show_displays
from notebook_accel.notebook.snapshot import render_slim, render_snapshot

if TYPE_CHECKING:
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.run import Run

__all__ = ["Transcript"]


class Transcript(PlainView):
    """Prints as :class:`PlainView` does; the summary stands in the notebook as HTML, once.

    Args:
        waits: whether the cell waits for the run. Where it does not, nothing can be added to it
            once it has ended: the summary takes a slot in it from the start, and holds the ranks'
            lines and what was displayed as well. A cell that calls ``run.wait()``, if any, says
            how far the run is, and what it has noticed.
        is_cell: whether the run is a cell (``%%accelerate``), of which one line is enough.
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
            metrics = self._run._sample_metrics()
            self._slot.show(render_snapshot(state, metrics, with_displays=True).bundle)

    def reopen(self, run: Run) -> None:
        snapshot = render_snapshot(run.state, run._sample_metrics(), now=run.state.now())
        DisplaySlot().show(snapshot.bundle)
        RankDisplays().show_new(run.state)

    def show_displays(self, run: Run, rank: int) -> None:
        show_displays(run.state, rank)

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
            snapshot = render_snapshot(run.state, run._sample_metrics(), with_output=False)
        self._displays.show_new(run.state)
        self._slot.show(snapshot.bundle)
