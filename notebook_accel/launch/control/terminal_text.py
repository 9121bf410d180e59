"""Lines of output as a terminal would show them."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Tail", "append_output", "as_shown", "strip_escapes"]

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]+[0-~]|\x1b[@-Z\\-_]"
)
# Of a line that is longer, the end is shown: somebody prints dots.
_MAX_LINE = 10_000


def strip_escapes(text: str) -> str:
    """``text`` without ANSI escape sequences."""
    return _ESCAPES.sub("", text)


def as_shown(line: str) -> str:
    """What is left of a line after its carriage returns: the last rewrite that is not empty."""
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""


@dataclass(frozen=True)
class Tail:
    """The last lines of an output.

    Attributes:
        lines: as a terminal would show them.
        is_open: whether the last one goes on.
        is_rewound: whether what comes next overwrites the last one.
    """

    lines: tuple[str, ...] = ()
    is_open: bool = False
    is_rewound: bool = False


def append_output(tail: Tail, text: str, *, limit: int) -> Tail:
    """``tail`` with ``text`` after it, of which the last ``limit`` lines are kept."""
    if not text:
        return tail
    lines, new = tail.lines, text.split("\n")
    is_open = new[-1] != ""
    if not is_open:
        new.pop()
    if tail.is_open and lines:
        new[:1] = [lines[-1] + ("\r" if tail.is_rewound else "") + "".join(new[:1])]
        lines = lines[:-1]
    shown = (as_shown(line)[-_MAX_LINE:] for line in new[-limit:])
    return Tail((*lines, *shown)[-limit:], is_open, is_open and new[-1].endswith("\r"))
