"""The widgets of one panel, which share one layout, and one style a kind.

Of its own, each would be one more message to make it, one more to close it, and one more model for
a page that is reloaded: half of what such a page has to load before it shows the panel. The longer
that takes, the more often ipywidgets 8 gives the panel up ("model not found"): where the models
come just as a page has looked for them for two seconds, it no longer looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PanelWidgets"]


class PanelWidgets:
    """Makes the widgets of a panel, and closes all of them at once.

    What differs between widgets of one kind is said by their classes, never by layout or style.
    """

    def __init__(self) -> None:
        self._layout = ipywidgets.Layout()
        self._styles: dict[Callable[..., Any], Any] = {}
        self._made: list[Any] = []

    def make(self, kind: Callable[..., Any], *content: Any, **traits: Any) -> Any:
        """A new widget; ``traits`` may have a layout of its own, which is closed with the rest."""
        if kind in self._styles:
            traits["style"] = self._styles[kind]
        widget = kind(*content, **{"layout": self._layout, **traits})
        if hasattr(widget, "style"):
            self._styles[kind] = widget.style
        self._made.append(widget)
        return widget

    def close(self) -> None:
        """Close all: a page that connects asks for the state of each that there is."""
        # What is shared comes last: what uses it is still shown until it is closed itself.
        looks = [self._layout, *self._styles.values(), *(each.layout for each in self._made)]
        for widget in (*self._made, *looks):
            widget.close()
