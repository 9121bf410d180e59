"""Settings in the environment: ours (``NOTEBOOK_ACCEL_*``) first, then Accelerate's."""

from __future__ import annotations

import os

from notebook_accel.errors import ConfigError

__all__ = ["read", "read_count", "read_flag"]

_PREFIXES = ("NOTEBOOK_ACCEL_", "ACCELERATE_")
_TRUE = {"1", "true", "yes", "y", "t", "on"}
_FALSE = {"0", "false", "no", "n", "f", "off"}


def read(name: str) -> str | None:
    """The text of the setting, None where it is not given or empty."""
    found = _find(name)
    return None if found is None else os.environ[found].strip()


def read_flag(name: str) -> bool:
    """The setting as a flag, False where it is not given."""
    variable = _find(name)
    if variable is None:
        return False
    text = os.environ[variable].strip().lower()
    if text not in _TRUE | _FALSE:
        raise ConfigError(f"{variable}={text!r}: expected true or false")
    return text in _TRUE


def read_count(name: str) -> int | None:
    """The setting as a whole number of at least 1, None where it is not given."""
    variable = _find(name)
    if variable is None:
        return None
    text = os.environ[variable].strip()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{variable}={text!r}: expected a whole number of at least 1")
    return int(text)


def _find(name: str) -> str | None:
    variables = (prefix + name for prefix in _PREFIXES)
    return next((variable for variable in variables if os.environ.get(variable)), None)
