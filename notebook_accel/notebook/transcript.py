"""A run in a notebook that a program executes: plain lines, and the summary as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.launch.view.plain import PlainView
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.snapshot import Snapshot, render_snapshot

if TYPE_CHECKING:
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.run import Run

__all__ = ["Transcript"]


class Transcript(PlainView):
    """Prints as :class:`PlainView` does; the summary also stands in the notebook as HTML.

    Args:
        waits: whether the cell waits for the run. Where it does not, the summary takes a slot
            in it from the start, since nothing can be added to a cell that has ended.
    """

    def __init__(self, *, waits: bool = True) -> None:
        super().__init__()
        self._slot = DisplaySlot()
        self._waits = waits

    def open(self, run: Run) -> None:
        super().open(run)
        if not self._waits:
            self._slot.show({"text/plain": f"{run.name}: running"})

    def close(self, state: RunState) -> None:
        run = self._run
        if run is not None and not self._waits:
            self._slot.show(render_snapshot(state, run.sample_metrics()).bundle)

    def reopen(self, run: Run) -> None:
        DisplaySlot().show(_snapshot(run).bundle)

    def conclude(self, run: Run) -> None:
        if self._waits:
            self._slot.show(_snapshot(run).bundle)


def _snapshot(run: Run) -> Snapshot:
    return render_snapshot(run.state, run.sample_metrics(), now=run.state.now())
