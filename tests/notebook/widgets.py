"""Widgets as a person finds them: by their label, by their class on the page, by their text."""

from __future__ import annotations

from typing import Any

from ipywidgets.widgets import widget as widget_module

__all__ = ["classes", "field", "inside", "live_widgets", "part"]


def inside(widget: Any) -> list[Any]:
    """All widgets in a tree of them."""
    children = getattr(widget, "children", ())
    return [found for child in children for found in (child, *inside(child))]


def field(box: Any, label: str) -> Any:
    """The field or the button with this label."""
    (found,) = (one for one in inside(box) if getattr(one, "description", None) == label)
    return found


def classes(widget: Any) -> list[str]:
    """The classes by which the style sheet knows a widget."""
    return list(widget.get_state("_dom_classes")["_dom_classes"])


def part(box: Any, class_: str) -> Any:
    """The widget with this class."""
    (found,) = (one for one in inside(box) if class_ in classes(one))
    return found


def live_widgets() -> dict[str, Any]:
    """All widgets that were made and not closed, by their ids."""
    return dict(widget_module._instances)
