"""Widgets as a person finds them: by their label, by their class on the page, by their text."""

from typing import Any

from ipywidgets.widgets import widget as widget_module


def inside(widget: Any) -> list[Any]:
    children = getattr(widget, "children", ())
    return [found for child in children for found in (child, *inside(child))]


def field(box: Any, label: str) -> Any:
    (found,) = (one for one in inside(box) if getattr(one, "description", None) == label)
    return found


def classes(widget: Any) -> list[str]:
    return list(widget.get_state("_dom_classes")["_dom_classes"])


def part(box: Any, class_: str) -> Any:
    (found,) = (one for one in inside(box) if class_ in classes(one))
    return found


def live_widgets() -> dict[str, Any]:
    return dict(widget_module._instances)
