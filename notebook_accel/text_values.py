"""Converts settings from text (YAML, environment variables, the form) and to text (in errors)."""

from __future__ import annotations

import reprlib
from typing import Any

from notebook_accel.errors import ConfigError

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on", "y", "t"), True),
    **dict.fromkeys(("0", "false", "no", "off", "n", "f"), False),
}

# YAML's aliases make a value of gigabytes out of 300 bytes.
_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother, _repr.maxlong = 3, 200, 200, 100


def shown(value: object) -> str:
    """Return ``repr(value)`` for an error message, shortened if it is long."""
    return _repr.repr(value)


def parse_flag(name: str, text: str) -> bool:
    """Return True for "true", "1", "yes", "on", "y", "t", False for their opposites."""
    found = value_of(text, bool)
    if not isinstance(found, bool):
        raise ConfigError(f"{name}={shown(text)}: expected true or false")
    return found


def value_of(text: str, kind: Any) -> Any:
    """Return a text that cannot be converted unchanged: the caller checks it."""
    import msgspec

    if kind is bool:
        return _FLAGS.get(text.strip().lower(), text)
    try:
        return msgspec.convert(text if kind is str else text.strip(), kind, strict=False)
    except msgspec.ValidationError:
        return text
