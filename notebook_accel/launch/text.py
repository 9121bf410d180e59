"""Lines of output as a terminal would show them."""

from __future__ import annotations

import re

__all__ = ["append_output", "as_shown", "strip_escapes"]

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


def strip_escapes(text: str) -> str:
    """``text`` without ANSI escape sequences."""
    return _ESCAPES.sub("", text)


def as_shown(line: str) -> str:
    """What is left of a line after its carriage returns: the last rewrite that is not empty."""
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""


def append_output(
    tail: tuple[str, ...], open_line: bool, text: str, *, limit: int
) -> tuple[tuple[str, ...], bool]:
    """The last ``limit`` lines of ``tail`` with ``text`` after it, and whether the last goes on."""
    if not text:
        return tail, open_line
    lines = text.split("\n")
    still_open = lines[-1] != ""
    if not still_open:
        lines.pop()
    if open_line and tail and lines:
        lines[0] = tail[-1] + lines[0]
        tail = tail[:-1]
    shown = (*tail, *(as_shown(line.rstrip("\r")) for line in lines))
    return shown[-limit:], still_open
