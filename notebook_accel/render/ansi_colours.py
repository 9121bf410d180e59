"""Turn terminal text with ANSI colours into HTML that is readable on light and dark pages.

Programs colour their output by escape sequences: ``ESC [ 31 m`` is red, ``ESC [ 0 m`` ends all
styles. Colours are mid tones in inline styles, since a saved notebook keeps no style sheet. The 16
colours of a terminal, bold, dim, italic and underline are kept; all other sequences are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup

from notebook_accel.render.markup import element, escape, join

# "Select graphic rendition"; the other sequences move the cursor and the like. No real one is
# longer, and Python refuses to read a number of thousands of digits.
_SGR = re.compile(r"\x1b\[([0-9;]{0,64})m")
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
# The property of CSS that a code sets; None is the page's own.
_CODES: dict[int, dict[str, str | None]] = {
    1: {"font-weight": "bold"},
    2: {"opacity": ".65"},
    3: {"font-style": "italic"},
    4: {"text-decoration": "underline"},
    22: {"font-weight": None, "opacity": None},
    23: {"font-style": None},
    24: {"text-decoration": None},
    39: {"color": None},
    49: {"background": None},
    **{start + i: {"color": c} for start in (30, 90) for i, c in enumerate(_PALETTE)},
    **{start + i: {"background": f"{c}55"} for start in (40, 100) for i, c in enumerate(_PALETTE)},
}


def ansi_to_markup(text: str) -> Markup:
    """ANSI styles become spans; other sequences are dropped."""
    if "\x1b" not in text:
        return escape(text)
    parts: list[Markup] = []
    style: dict[str, str | None] = {}
    # The even pieces are text, the odd ones the numbers of the sequence after it.
    for index, piece in enumerate(_SGR.split(text)):
        if index % 2:
            for code in (int(number or 0) for number in piece.split(";")):
                if code in (38, 48):
                    # One of 256 colours, or of all: few programs write them where no terminal is.
                    break
                style = {**style, **_CODES.get(code, {})} if code else {}
        elif piece:
            css = ";".join(f"{name}:{value}" for name, value in sorted(style.items()) if value)
            parts.append(element("span", piece, style=css) if css else escape(piece))
    return join(parts)


def lines_to_markup(lines: Iterable[str], style: str | None = None) -> Markup:
    """Return lines as one ``<pre>``: a colour goes on in the next line, until it is ended."""
    text = ansi_to_markup("\n".join(lines))
    # A parser drops a newline right after the tag, so an empty first line needs one more.
    return element("pre", Markup("\n") + text if text.startswith("\n") else text, style=style)
