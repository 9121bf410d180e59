"""HTML that cannot be injected: every piece of text is escaped unless it is :class:`Html`."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

from notebook_accel.launch.control.terminal_text import strip_escapes

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Html", "cut", "element", "escape", "join", "weight"]

# A parser ends the document, or shows a box, at these.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# Bytes of characters that markup writes as several.
_ESCAPED = {"&": 5, "<": 4, ">": 4, '"': 6, "'": 6}
_VOID = frozenset({"br", "col", "img"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: str) -> Html:
    """``text`` as HTML; terminal colours and control characters go."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_CONTROLS.sub("", strip_escapes(text)), quote=True))


def join(parts: Iterable[str], separator: str = "") -> Html:
    """The parts after each other, each escaped where it is plain text."""
    return Html(separator.join(escape(part) for part in parts))


def element(tag: str, /, *children: str, **attributes: str | float | bool | None) -> Html:
    """One element; ``class_`` and ``aria_label`` are written with their HTML names.

    An attribute that is None or False is left out, one that is True has no value.
    """
    start = "".join([f"<{tag}", *map(_attribute, attributes, attributes.values()), ">"])
    if tag in _VOID:
        return Html(start)
    return Html(f"{start}{join(children)}</{tag}>")


def _attribute(name: str, value: str | float | bool | None) -> str:
    name = name.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f" {name}='{escape(str(value))}'"


def cut(text: str, limit: int) -> str:
    """``text`` in about ``limit`` bytes of markup; an ellipsis stands for the rest."""
    used = 0
    for index, letter in enumerate(text):
        used += _ESCAPED.get(letter, 1 if letter.isascii() else 3)
        if used > limit:
            return text[: max(0, index - 1)] + "…"
    return text


def weight(markup: str) -> int:
    """Bytes that ``markup`` has as a JSON string in a message."""
    return len(markup.encode()) + markup.count('"') + markup.count("\n") + markup.count("\\")
