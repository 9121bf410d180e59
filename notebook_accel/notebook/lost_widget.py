"""What a saved notebook says below a widget, for pages that will not find it.

A notebook that is opened with another kernel than the widget's has "Error displaying widget: model
not found" in its place: pages prefer the widget to the text beside it. So the text is an output of
its own, which a style sheet inside the widget hides while there is a widget.
"""

from __future__ import annotations

import uuid

from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.markup import Markup, element

__all__ = ["LostWidgetText"]


class LostWidgetText:
    """The text below one widget; nothing stands there until it is shown.

    Attributes:
        hiding_style: hides the text in a page that draws it.

    Args:
        text: what the widget was, and what to type.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._slot: DisplaySlot | None = None
        # Of its own: another widget in the page must not hide it.
        self._class = f"na-lost-{uuid.uuid4().hex}"
        self.hiding_style = Markup(f"<style>.{self._class} {{ display: none; }}</style>")

    def show(self) -> None:
        """Put the text into the output of the cell that runs now, once; only its thread may."""
        if self._slot is None:
            self.place()

    def place(self) -> None:
        """Put the text into the output of the cell that runs now, also where it is in others."""
        if self._slot is not None:
            self._slot.place()
            return
        self._slot = DisplaySlot()
        html = element("div", self._text, class_=self._class, style="opacity:.65;font-size:13px")
        self._slot.show({"text/html": str(html), "text/plain": self._text})

    def clear(self) -> None:
        """Take the text away, wherever it stands: there is something better now."""
        if self._slot is not None:
            self._slot.clear()
