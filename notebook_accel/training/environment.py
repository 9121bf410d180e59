"""Settings in the environment: ours (``NOTEBOOK_ACCEL_*``) first, then Accelerate's."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from notebook_accel.config import parse_flag
from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["patch_environment", "read", "read_count", "read_flag"]

_PREFIXES = ("NOTEBOOK_ACCEL_", "ACCELERATE_")


def read(name: str) -> str | None:
    """The text of the setting, None where it is not given or empty."""
    found = _find(name)
    return None if found is None else os.environ[found].strip()


def read_flag(name: str) -> bool:
    """The setting as a flag, False where it is not given.

    Raises:
        ConfigError: its text is no flag.
    """
    variable = _find(name)
    return variable is not None and parse_flag(variable, os.environ[variable])


def read_count(name: str) -> int | None:
    """The setting as a whole number of at least 1, None where it is not given."""
    variable = _find(name)
    if variable is None:
        return None
    text = os.environ[variable].strip()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{variable}={text!r}: expected a whole number of at least 1")
    return int(text)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables inside a ``with`` block; what was there comes back after it.

    Args:
        kwargs: the variables' names, put into upper case, and values, made text.
    """
    given = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _find(name: str) -> str | None:
    variables = (prefix + name for prefix in _PREFIXES)
    return next((variable for variable in variables if os.environ.get(variable, "").strip()), None)
