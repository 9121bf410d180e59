"""Cleans the output of programs for terminals and pages.

Control sequences are removed. If a program rewrites a line with carriage returns, as progress bars
do, only the last text of the line is kept.

Output comes in pieces that may end in the middle of a line. A :class:`Tail` holds the newest lines,
and whether the last line is still incomplete; :func:`append_output` adds a piece. A line longer
than :data:`MAX_LINE` characters loses its middle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

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
_HALF = (MAX_LINE - len(GAP)) // 2


def escaped(value: Any) -> Any:
    """Return a copy of plain data (strings, dicts, lists, numbers) with lone surrogates escaped.

    Python puts a lone surrogate for each byte of a file name or variable that is not UTF-8 (PEP
    383). A string with a surrogate cannot be drawn, sent or written, so each surrogate becomes the
    text ``\\udcff`` or similar. A tuple becomes a list.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(key): escaped(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [escaped(part) for part in value]
    return value


def plain_text(text: str) -> str:
    """Return ``text`` without escape sequences and control characters.

    Tabs and newlines are kept; carriage returns are removed.
    """
    if text.isprintable():
        # Nearly all text is printable, and to ask takes a tenth of the time of the two searches.
        return text
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def one_line(text: str, limit: int) -> str:
    """Return ``text`` as plain text in one line, cut to ``limit`` characters; "…" marks a cut."""
    # A name may have megabytes, and is shown five times a second.
    line = plain_text(_BREAKS.sub(" ", text[: 20 * limit])).strip()
    is_whole = len(text) <= 20 * limit and len(line) <= limit
    return line if is_whole else line[: limit - 1] + "…"


def as_shown(line: str) -> str:
    """Return the last text of a line that carriage returns may have rewritten.

    ``"10%\\r20%\\r"`` gives ``"20%"``, the last part that is not empty. In a terminal, the end of
    an earlier, longer part would stay visible after a shorter part. No program intends that, so
    earlier parts are left out here.
    """
    if "\r" not in line:
        return line
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""


@dataclass(frozen=True)
class Tail:
    """The newest lines of a program's output; :func:`append_output` adds to them."""

    lines: tuple[str, ...] = ()
    is_open: bool = False
    is_rewound: bool = False


def append_output(tail: Tail, text: str, *, limit: int) -> Tail:
    """Return a tail with ``text`` added to ``tail``; it holds the last ``limit`` lines only."""
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
        new = [
            line if len(line) <= MAX_LINE else line[:_HALF] + GAP + line[-_HALF:] for line in new
        ]
    return Tail((*lines, *new)[-limit:], is_open, is_rewound)
