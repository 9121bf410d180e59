"""Text that UTF-8 cannot carry, on its way through a message.

Where a file name or a variable is not UTF-8, Python puts lone surrogates for its odd bytes, which
lead back to them (PEP 383). Where it names something on disk it must arrive as it was:
:func:`wrapped` and :func:`unwrapped` are the two ends of that. Where a person reads it, nothing
could be drawn or written with it: :func:`escaped` spells its odd characters as ``\\udcff``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["escaped", "unwrapped", "wrapped"]

# No path and no variable has one; what comes after it is the text in hexadecimal digits.
_MARK = "\0"


def escaped(value: Any) -> Any:
    """Plain data in whose texts odd characters are spelled out."""
    return _with_text(value, lambda text: text.encode("utf-8", "backslashreplace").decode())


def wrapped(value: Any) -> Any:
    """Plain data whose texts UTF-8 can carry, and of which :func:`unwrapped` makes ``value``."""

    def wrap(text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            return _MARK + text.encode("utf-8", "surrogatepass").hex()
        return text

    return _with_text(value, wrap)


def unwrapped(value: Any) -> Any:
    """What :func:`wrapped` was given.

    Raises:
        ValueError: a text has the mark and is none of :func:`wrapped`.
    """

    def unwrap(text: str) -> str:
        if not text.startswith(_MARK):
            return text
        return bytes.fromhex(text[len(_MARK) :]).decode("utf-8", "surrogatepass")

    return _with_text(value, unwrap)


def _with_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_with_text(key, change): _with_text(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_text(part, change) for part in value]
    return value
