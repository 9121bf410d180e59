"""Text for terminals and pages: control sequences are left out, and rewritten lines show their
last state.

Output comes in pieces that end anywhere. A :class:`Tail` holds the newest lines and whether the
last of them goes on; :func:`append_output` adds a piece. Of a line of megabytes it holds both ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = [
    "GAP",
    "MAX_LINE",
    "Tail",
    "append_output",
    "as_shown",
    "escaped",
    "one_line",
    "plain_text",
]

# Escape sequences of a terminal begin with ESC, or with a single character from \x80 to \x9f.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    # Within a line: a title that is never ended would swallow the lines up to the next bell. And up
    # to the next begin of one: the time that a line of begins takes would grow by its square.
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\x9d\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]+[0-~]|\x1b[@-Z\\-_]"
)
# Some of these characters are not allowed in a page, others a terminal obeys; the last ones change
# the direction of text, so that it reads as what it is not.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)
# NEL (\x85) breaks a line, but plain_text would take it out as a control character, and so join the
# two lines: it is replaced before.
_BREAKS = re.compile(r"[\s\x85]+")
# Characters of a line, beyond which its middle is left out: its begin says what it is, and its end
# is what moves, where a program prints its progress as dots.
MAX_LINE = 4_000
# Stands for what was left out. In a log a lone ellipsis could be the program's own.
GAP = " […] "


def escaped(value: Any) -> Any:
    """Return plain data with lone surrogates in its texts escaped.

    Where a file name or a variable is not UTF-8, Python puts lone surrogates for its odd bytes (PEP
    383), with which nothing could be drawn, sent or written: they become ``\\udcff``.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(key): escaped(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [escaped(part) for part in value]
    return value


def plain_text(text: str) -> str:
    """``text`` without escape sequences and control characters; tabs and line breaks stay."""
    if text.isprintable():
        # Nearly all text is printable, and to ask takes a tenth of the time of the two searches.
        return text
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def one_line(text: str, limit: int) -> str:
    """A name as plain text in one line of at most ``limit`` characters."""
    # A name may have megabytes, and is shown five times a second.
    line = plain_text(_BREAKS.sub(" ", text[: 20 * limit])).strip()
    is_whole = len(text) <= 20 * limit and len(line) <= limit
    return line if is_whole else line[: limit - 1] + "…"


def as_shown(line: str) -> str:
    """Return the last state of a line that carriage returns rewrote.

    ``"10%\\r20%\\r"`` is ``"20%"``: the last rewrite that is not empty. A terminal would leave the
    end of a longer rewrite standing; nobody means that.
    """
    if "\r" not in line:
        return line
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""


@dataclass(frozen=True)
class Tail:
    """The last lines of an output.

    Attributes:
        lines: as a terminal would show them.
        is_open: whether the last line has no end yet, so that what comes next belongs to it.
        is_rewound: whether it ended with a carriage return, so that what comes next replaces it.
    """

    lines: tuple[str, ...] = ()
    is_open: bool = False
    is_rewound: bool = False


def append_output(tail: Tail, text: str, *, limit: int) -> Tail:
    """Add ``text`` to ``tail``; the last ``limit`` lines of both are kept."""
    if not text:
        return tail
    lines, new = tail.lines, text.split("\n")
    is_open = new[-1] != ""
    if not is_open:
        new.pop()
    if tail.is_open and lines:
        # The first piece goes on with the open line; the carriage return was stripped when shown.
        new[:1] = [lines[-1] + ("\r" if tail.is_rewound else "") + "".join(new[:1])]
        lines = lines[:-1]
    is_rewound = is_open and new[-1].endswith("\r")
    new = new[-limit:]
    # Asked of all at once: thousands of lines a second come here, and nearly none needs either.
    if "\r" in text or tail.is_rewound:
        new = list(map(as_shown, new))
    if max(map(len, new)) > MAX_LINE:
        new = list(map(_both_ends, new))
    return Tail((*lines, *new)[-limit:], is_open, is_rewound)


def _both_ends(line: str) -> str:
    """Return a line; of one over ``MAX_LINE`` characters, both ends with a gap.

    Where a piece is added to what this gave, the begin stays, and the end is that of the piece.
    """
    if len(line) <= MAX_LINE:
        return line
    half = (MAX_LINE - len(GAP)) // 2
    return f"{line[:half]}{GAP}{line[-half:]}"
