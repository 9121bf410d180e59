"""HTML that cannot be injected: every piece of text is escaped unless it is ``Markup``.

``Markup`` is the class of markupsafe: text that is HTML already. Output of ranks, names of metrics
and texts of exceptions are plain ``str``. They become ``Markup`` only by the functions here, which
escape them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import markupsafe
from markupsafe import Markup

from notebook_accel.launch.text.terminal_text import plain_text

# Bytes of the characters that markupsafe writes as several.
_ESCAPED_BYTES = {"&": 5, "<": 4, ">": 4, '"': 5, "'": 5}
# By an event: pages that are not served by HTTPS have no clipboard of their own.
_COPY = (
    "const put=e=>{e.clipboardData.setData('text/plain',this.dataset.code);e.preventDefault()};"
    "document.addEventListener('copy',put);if(document.execCommand('copy'))this.value='Copied';"
    "document.removeEventListener('copy',put)"
)
# How elements without content end: of HTML, and of SVG.
_VOID_TAGS = {**dict.fromkeys(("br", "col", "img", "input"), ">"), "line": "/>", "path": "/>"}


def escape(text: str) -> Markup:
    """Escape without terminal colours and control characters; ``Markup`` is returned unchanged."""
    if isinstance(text, Markup):
        return text
    return markupsafe.escape(plain_text(text))


def join(parts: Iterable[str]) -> Markup:
    """Escape the parts that are plain text."""
    # Markup's own join would escape each part once more.
    return Markup("".join(map(escape, parts)))


def element(tag: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """Return one HTML element with its attributes and children; plain text in both is escaped.

    ``aria_label``, ``class_`` are HTML's names; None or False leaves one out, True has no value.
    """
    start = f"<{tag}"
    for name, value in attributes.items():
        html_name = name.rstrip("_").replace("_", "-")
        if value is True:
            start += f" {html_name}"
        elif value is not None and value is not False:
            # Single quotes: in the JSON of a message a double one costs a backslash more.
            start += f" {html_name}='{escape(str(value))}'"
    if tag in _VOID_TAGS:
        return Markup(f"{start}{_VOID_TAGS[tag]}")
    return Markup(f"{start}>{''.join(map(escape, children))}</{tag}>")


def copyable(tag: str, text: str) -> Markup:
    """Return ``text`` beside a copy button, whose script does not run in a saved notebook."""
    return join([element(tag, text), " ", copy_button(text, class_="na-copy")])


def copy_button(code: str, **look: str) -> Markup:
    """Return a button without text between tags: sanitisers that drop the button would keep it."""
    return element("input", type="button", value="Copy", onclick=_COPY, data_code=code, **look)


def pick_script(item: str, text: str, choice: str) -> str:
    """Return what picks, as a mouse's button goes down on an item, the same in a list of the panel.

    Nothing depends on it: the list does the same, by the keyboard too. A click whose two halves
    meet two drawings of the item would be none.

    Args:
        item: CSS selector of the items; ``text`` is JavaScript for the number of one, ``r``.
        choice: CSS class of the list, whose first option is no item.
    """
    return (
        f"if(event.button)return;const r=event.target.closest('{item}'),"
        f"s=this.closest('.na-panel').querySelector('.{choice} select');"
        f"if(r&&s){{s.selectedIndex=+{text}+1;"
        "s.dispatchEvent(new Event('change',{bubbles:true}))}"
    )


def file_link(text: str, name: str, data: bytes, kind: str, **attributes: str | None) -> Markup:
    """Return a link that saves ``data`` as a file; ``kind`` is its media type."""
    href = f"data:{kind};charset=utf-8;base64,{base64.b64encode(data).decode()}"
    return element("a", text, download=name, href=href, **attributes)


def shorten(text: str, max_bytes: int) -> str:
    """Cut to about ``max_bytes`` bytes of HTML; an ellipsis marks a cut."""
    # Most texts are far shorter, and thousands a second come here.
    if len(text) * 5 <= max_bytes:
        return text
    used = 0
    for index, letter in enumerate(text):
        used += _ESCAPED_BYTES.get(letter, 1 if letter.isascii() else 3)
        if used > max_bytes:
            return text[: max(0, index - 1)] + "…"
    return text


def message_bytes(markup: str) -> int:
    """Return the bytes that ``markup`` takes as a JSON string in a message to the page."""
    return len(markup.encode()) + markup.count('"') + markup.count("\n") + markup.count("\\")


@lru_cache
def style_element(name: str = "panel") -> Markup:
    """Return ``NAME.css`` of this folder."""
    return Markup(f"<style>{Path(__file__).with_name(f'{name}.css').read_text()}</style>")


# ---- terminal colours --------------------------------------------------------------------
#
# ``ESC [ 31 m`` is red, ``ESC [ 0 m`` ends all styles. Colours are mid tones in inline styles,
# since a saved notebook keeps no style sheet. The 16 colours of a terminal, bold, dim, italic and
# underline are kept; all other sequences are dropped.


# "Select graphic rendition"; the other sequences move the cursor and the like. No real one is
# longer, and Python refuses to read a number of thousands of digits.
_SGR = re.compile(r"\x1b\[([0-9;]{0,64})m")
# The eight colours of a terminal: at least 3:1 against white and against #1e1e1e alike. White and
# black are greys, since one of them would be lost on each kind of page.
_PALETTE = ("#7f7f7f", "#cf4f57", "#3a9a55", "#b0851e", "#2f86d6", "#a86bd1", "#2f98a5", "#8c8c8c")
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
