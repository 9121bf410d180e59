"""The colours of logs: coloured terminal text as HTML that reads on light and on dark pages.

Programs colour their output by escape sequences: ``ESC [ 31 m`` is red, ``ESC [ 0 m`` ends all.
Colours are shown in mid tones as inline styles, since a saved notebook keeps no style sheet.
Everything but colour and weight is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from notebook_accel.notebook.markup import Markup, element, escape, join

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ansi_to_markup"]

# "Select graphic rendition"; the other sequences move the cursor and the like. No real one is
# longer, and Python refuses to read a number of thousands of digits.
_SGR = re.compile(r"\x1b\[([0-9;:]{0,64})m")
# The eight colours of a terminal: at least 3:1 against white and against #1e1e1e alike. White and
# black are greys, since one of them would be lost on each kind of page.
_PALETTE = (
    "#7f7f7f",
    "#cf4f57",
    "#3a9a55",
    "#b0851e",
    "#2f86d6",
    "#a86bd1",
    "#2f98a5",
    "#8c8c8c",
)
# The levels of red, green and blue in the 6 x 6 x 6 cube of 256 colours.
_CUBE = (0, 95, 135, 175, 215, 255)


@dataclass(frozen=True)
class _Style:
    """How text looks from here on; None and False are the page's own."""

    colour: str | None = None
    background: str | None = None
    bold: bool = False
    faint: bool = False
    italic: bool = False
    underlined: bool = False

    def css(self) -> str:
        parts = [
            f"color:{self.colour}" if self.colour else "",
            f"background:{self.background}55" if self.background else "",
            "font-weight:bold" if self.bold else "",
            "opacity:.65" if self.faint else "",
            "font-style:italic" if self.italic else "",
            "text-decoration:underline" if self.underlined else "",
        ]
        return ";".join(part for part in parts if part)


# What each number of a sequence changes; colours aside.
_CHANGES: dict[int, dict[str, object]] = {
    1: {"bold": True},
    2: {"faint": True},
    3: {"italic": True},
    22: {"bold": False, "faint": False},
    23: {"italic": False},
    24: {"underlined": False},
    39: {"colour": None},
    49: {"background": None},
}


def ansi_to_markup(text: str) -> Markup:
    """``text`` as HTML: its colours as spans, all else escaped, other sequences left out."""
    if "\x1b" not in text:
        return escape(text)
    parts: list[Markup] = []
    style = _Style()
    # The even pieces are text, the odd ones the numbers of the sequence after it.
    pieces = _SGR.split(text)
    for index, piece in enumerate(pieces):
        if index % 2:
            style = _after(style, piece)
        elif piece:
            css = style.css()
            parts.append(element("span", piece, style=css) if css else escape(piece))
    return join(parts)


def _after(style: _Style, numbers: str) -> _Style:
    """``style`` after one sequence; what is not known changes nothing."""
    # What colons join is one code and what belongs to it; a colour may be written by semicolons.
    parts = [[int(number or 0) for number in part.split(":")] for part in numbers.split(";")]
    codes = iter(parts)
    for code, *details in codes:
        if code == 0:
            style = _Style()
        elif code == 4:
            # ``4:0`` is no line, ``4:3`` a wavy one.
            style = replace(style, underlined=details[:1] != [0])
        elif code in _CHANGES:
            style = replace(style, **_CHANGES[code])  # type: ignore[arg-type]
        elif code == 38:
            style = replace(style, colour=_extended(details or _next_of(codes)))
        elif code == 48:
            style = replace(style, background=_extended(details or _next_of(codes)))
        elif code in range(30, 38) or code in range(90, 98):
            style = replace(style, colour=_PALETTE[code % 10])
        elif code in range(40, 48) or code in range(100, 108):
            style = replace(style, background=_PALETTE[code % 10])
    return style


def _next_of(codes: Iterator[list[int]]) -> list[int]:
    """What belongs to 38 or 48 where semicolons divide it: the kind, and as many as it takes."""
    kind = next(codes, [0])[0]
    return [kind, *(code[0] for code in islice(codes, {2: 3, 5: 1}.get(kind, 0)))]


def _extended(details: list[int]) -> str | None:
    """The colour that ``5, N`` (of 256) or ``2, R, G, B`` names; None for no colour.

    By colons there may be a colour space before the red: ``2::R:G:B``.
    """
    values = [*details[1:], 0, 0, 0]
    if details[0] == 2:
        return _mid_tone(values[1:4] if len(details) > 4 else values[:3])
    if details[0] != 5:
        return None
    number = values[0]
    if number < 16:
        return _PALETTE[number % 8]
    if number < 232:
        cell = number - 16
        return _mid_tone([_CUBE[cell // 36], _CUBE[cell // 6 % 6], _CUBE[cell % 6]])
    return _mid_tone([8 + 10 * (number - 232)] * 3)


def _mid_tone(rgb: list[int]) -> str:
    """The colour, made lighter or darker until it reads on light and on dark pages."""
    red, green, blue = (min(255.0, max(0.0, level)) for level in rgb)
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    if luminance > 150:
        red, green, blue = (level * 150 / luminance for level in (red, green, blue))
    elif luminance < 90:
        # Towards grey: black itself has no hue to scale.
        share = (90 - luminance) / (255 - luminance)
        red, green, blue = (level + (255 - level) * share for level in (red, green, blue))
    return f"#{int(red):02x}{int(green):02x}{int(blue):02x}"
