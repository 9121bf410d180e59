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
        widget = kind(*content, **{"layout": self._layout, **traits})
        for name in classes.split():
            widget.add_class(name)
        if hasattr(widget, "style"):
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
        chosen = choice.value
        choice.options = options
        choice.value = chosen

    def close(self) -> None:
        """Close all widgets: a connecting page asks for the state of each that is open."""
        # What is shared comes last: what uses it is still shown until it is closed itself.
        looks = [self._layout, *self._styles.values(), *(each.layout for each in self._made)]
        for widget in (*self._made, *looks):
            widget.close()
