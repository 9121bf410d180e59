"""The view of a run where pages draw nothing between cells (Colab)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.getipython import get_ipython

from notebook_accel.launch import run_list
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.notebook.dashboard import Dashboard
from notebook_accel.notebook.snapshot import render_line

if TYPE_CHECKING:
    from notebook_accel.launch.run import Run
    from notebook_accel.notebook.lost_widget import LostWidgetText

__all__ = ["CellDashboard"]


class CellDashboard(Dashboard):
    """The live panel of one run, drawn by the thread of a cell that waits for it, in that cell.

    A run in the background is a line that says what to type, until a cell waits for it or shows it.
    """

    # The number of the newest cell that shows the run.
    _placed_in: int | None = None

    def _begin_drawing(self, run: Run, lost_text: LostWidgetText) -> None:
        """Show a line. No thread draws what becomes of it, and so no page loses it."""
        self._is_drawing = True
        # A click has no cell.
        self._placed_in = _number_of_cell() if self._has_own_slot else None
        name = one_line(run.state.name, 60)
        typed = run_list.expression(run.id)
        text = (
            f"{name}: running"
            if self._waits
            else f"{name}: runs in the background. {typed}.wait() in a cell shows it live, "
            ".show() how it stands then"
        )
        self._slot.show(render_line(text).bundle)

    def _draw(self) -> None:
        self._place_in_cell()
        super()._draw()

    def print_end(self) -> None:
        self._place_in_cell()
        # What another thread has sent may come after the end of this cell.
        self._slot.send_again()
        super().print_end()

    def _place_in_cell(self) -> None:
        """Show the run in the cell that waits for it, once."""
        if self._placed_in != _number_of_cell():
            self._placed_in = _number_of_cell()
            self._slot.place()


def _number_of_cell() -> int | None:
    """The number of the cell that runs now; None outside of IPython."""
    number: int | None = getattr(get_ipython(), "execution_count", None)
    return number
