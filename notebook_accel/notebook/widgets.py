"""The widgets of a panel: made alike, let through to a busy kernel, and closed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from notebook_accel.notebook.clicks import ClicksAfterTheCell


class PanelWidgets:
    """Makes and closes the widgets of one panel; all of one class share a layout and a style.

    Own ones would double what a reloaded page loads before it shows the panel; ipywidgets 8 looks
    for models for two seconds only ("model not found"). Widgets differ by their CSS classes alone.

    All that a widget is goes into the message that makes it: whoever reads slowly is told no more
    than a thousand messages, and what follows is lost, the end of the cell with it.

    Args:
        clicks: how the clicks of a page reach the kernel.
    """

    def __init__(self, clicks: ClicksAfterTheCell | None = None) -> None:
        self.let_through = (clicks or ClicksAfterTheCell(None)).let_through
        self._layout = ipywidgets.Layout()
        self._styles: dict[Callable[..., Any], Any] = {}
        self._made: list[Any] = []

    def make(
        self, kind: Callable[..., Any], *content: Any, classes: str = "", **traits: Any
    ) -> Any:
        """Make a widget for :meth:`close`; a ``layout`` in ``traits`` replaces the shared one."""
        if kind in self._styles:
            traits["style"] = self._styles[kind]
        shared = {"layout": self._layout, "_dom_classes": classes.split()}
        widget = kind(*content, **{**shared, **traits})
        if kind not in self._styles and hasattr(widget, "style"):
            self._styles[kind] = widget.style
        self._made.append(widget)
        return widget

    def field(
        self, kind: Callable[..., Any], name: str, about: str, *, classes: str, **traits: Any
    ) -> Any:
        """Make what a person fills in; ``about`` is its tooltip."""
        widget = self.make(kind, description=name, tooltip=about, classes=classes, **traits)
        self.let_through(widget)
        return widget

    def button(
        self, name: str, about: str, act: Callable[[], object], classes: str = "na-small-button"
    ) -> Any:
        button = self.field(ipywidgets.Button, name, about, classes=classes)
        button.on_click(lambda _: act())
        return button

    @staticmethod
    def offer(choice: Any, options: Sequence[Any]) -> None:
        """Change what a list offers; setting its options alone would choose the first one."""
        # In one message: a page that was told of the options alone may choose one of them at once,
        # which the old choice would replace.
        with choice.hold_sync():
            chosen = choice.value
            choice.options = options
            choice.value = chosen

    def close(self) -> None:
        """Close all widgets: a connecting page asks for the state of each that is open."""
        # What is shared comes last: what uses it is still shown until it is closed itself.
        looks = [self._layout, *self._styles.values(), *(each.layout for each in self._made)]
        for widget in (*self._made, *looks):
            widget.close()
