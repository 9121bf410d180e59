"""A run in a notebook that a program executes: plain lines, and the summary as HTML."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from notebook_accel.launch.view.plain import PlainView
from notebook_accel.notebook import output
from notebook_accel.notebook.snapshot import Snapshot, render_snapshot

if TYPE_CHECKING:
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.run import Run

__all__ = ["Transcript"]


class Transcript(PlainView):
    """Prints as :class:`PlainView` does; the summary also stands in the notebook as HTML.

    Args:
        waits: whether the cell waits for the run. Where it does not, the summary takes a place
            in it from the start, since nothing can be added to a cell that has ended.
    """

    def __init__(self, *, waits: bool = True) -> None:
        super().__init__()
        self._id = f"notebook-accel-{uuid.uuid4().hex}"
        self._waits = waits

    def open(self, run: Run) -> None:
        super().open(run)
        if not self._waits:
            output.put({"text/plain": f"{run.name}: running"}, self._id)

    def close(self, state: RunState) -> None:
        run = self._run
        if run is not None and not self._waits:
            output.replace(render_snapshot(state, run.sample_metrics()).bundle, self._id)

    def reopen(self, run: Run) -> None:
        output.put(_snapshot(run).bundle)

    def conclude(self, run: Run) -> None:
        if self._waits:
            output.put(_snapshot(run).bundle, self._id)


def _snapshot(run: Run) -> Snapshot:
    return render_snapshot(run.state, run.sample_metrics(), now=time.time())
