"""What a saved notebook says below a live panel, for pages that will not find it.

A notebook that is opened with another kernel than the panel's has "Error displaying widget: model
not found" in place of the panel: pages prefer the widget to the text beside it. So the text is an
output of its own, which the panel's style sheet hides while there is a panel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.launch import run_list
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.markup import Markup, element

if TYPE_CHECKING:
    from notebook_accel.launch.run import Run

__all__ = ["LostPanelText"]


class LostPanelText:
    """The text below one panel; nothing stands there until it is shown.

    Attributes:
        hiding_style: hides the text in a page that draws it.

    Args:
        run: the panel's.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._slot: DisplaySlot | None = None
        # Of its own: another panel in the page must not hide it.
        self._class = f"na-lost-{run.id}"
        self.hiding_style = Markup(f"<style>.{self._class} {{ display: none; }}</style>")

    def show(self) -> None:
        """Put the text into the output of the launching cell, once; only its own thread may."""
        if self._slot is None:
            self.place()

    def place(self) -> None:
        """Put the text into the output of the cell that runs now, also where it is in others."""
        if self._slot is not None:
            self._slot.place()
            return
        self._slot = DisplaySlot()
        text = (
            f"{one_line(self._run.state.name, 60)} (run {self._run.id}): where no live panel is "
            f"above, its kernel is gone. {run_list.expression(self._run.id)}.show() draws what was "
            "kept."
        )
        html = element("div", text, class_=self._class, style="opacity:.65;font-size:13px")
        self._slot.show({"text/html": str(html), "text/plain": text})

    def clear(self) -> None:
        """Take the text away, wherever it stands: the run has left something better."""
        if self._slot is not None:
            self._slot.clear()
