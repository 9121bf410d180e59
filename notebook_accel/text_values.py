"""Settings as text: what a text of YAML, a variable or a form means, and a value in an error."""

from __future__ import annotations

import reprlib
from typing import Any

from notebook_accel.errors import ConfigError

__all__ = ["parse_flag", "shown", "value_of"]

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on", "y", "t"), True),
    **dict.fromkeys(("0", "false", "no", "off", "n", "f"), False),
}

# YAML's aliases make a value of gigabytes out of 300 bytes.
_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother, _repr.maxlong = 3, 200, 200, 100


def shown(value: object) -> str:
    """``repr(value)``, of bounded length whatever the value is."""
    return _repr.repr(value)


def parse_flag(name: str, text: str) -> bool:
    """The flag that a text means: true, 1, yes, on, or the opposite.

    Raises:
        ConfigError: it means neither; the message calls it ``name``.
    """
    found = value_of(text, bool)
    if not isinstance(found, bool):
        raise ConfigError(f"{name}={shown(text)}: expected true or false")
    return found


def value_of(text: str, kind: Any) -> Any:
    """The value of the type ``kind`` that a text means; the text itself where it means none."""
    import msgspec

    if kind is bool:
        return _FLAGS.get(text.strip().lower(), text)
    try:
        return msgspec.convert(text if kind is str else text.strip(), kind, strict=False)
    except msgspec.ValidationError:
        return text
