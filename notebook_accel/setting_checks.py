"""Checks of one setting's value: each error has what was given, and what was expected."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.text_values import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "as_choice",
    "as_count",
    "as_devices",
    "as_env",
    "as_index",
    "as_port",
    "as_seed",
    "check_enough",
    "check_enough_devices",
    "check_seconds",
]


def as_count(name: str, value: Any) -> int | None:
    """The whole number of at least 1 that ``value`` is; None stays None.

    Raises:
        ConfigError: it is none; the message calls it ``name``.
    """
    if value is None:
        return None
    number = as_index(value)
    if number is None or number < 1:
        raise ConfigError(f"{name}={shown(value)}: expected a whole number, 1 or more")
    return number


def as_index(value: Any) -> int | None:
    """The whole number that ``value`` is (numpy's included), else None; a flag is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_seed(value: Any) -> int | None:
    """The seed that ``value`` is; None stays None.

    Raises:
        ConfigError: no generator takes it.
    """
    number = None if value is None else as_index(value)
    if value is not None and (number is None or not 0 <= number < 2**63):
        raise ConfigError(f"seed={shown(value)}: expected a whole number, 0 or more, below 2**63")
    return number


def check_seconds(name: str, value: Any, *, above_zero: bool = False) -> None:
    """Refuse what is no number of seconds: text, flags, NaN, less than nothing.

    Raises:
        ConfigError: the message calls the value ``name``.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value < 0 or (above_zero and not value):
        expected = "a number of seconds above 0" if above_zero else "seconds, 0 or more"
        raise ConfigError(f"{name}={shown(value)}: expected {expected}")


def as_choice(name: str, value: Any, choices: Sequence[str | None]) -> str | None:
    """The one of the choices that ``value`` is, as a plain text where it is a member of an Enum.

    Raises:
        ConfigError: it is none of them.
    """
    if not (value is None or isinstance(value, str)) or value not in choices:
        named = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise ConfigError(f"{name}={shown(value)}: expected one of {named}")
    return next(choice for choice in choices if choice == value)


def as_port(value: Any) -> int | None:
    """The port that ``value`` is; None stays None.

    Raises:
        ConfigError: it is none.
    """
    number = as_index(value)
    if value is not None and (number is None or not 0 < number < 65_536):
        raise ConfigError(f"use_port={shown(value)}: expected None (a free port) or 1 to 65535")
    return number


def as_env(value: Any) -> dict[str, str] | None:
    """The environment variables that ``value`` is, as plain texts; None stays None.

    The texts are in no error: they may be secrets, and a notebook is saved with its errors.

    Raises:
        ConfigError: it names the first variable that cannot be one.
    """
    if value is None:
        return None
    expected = "expected a mapping of names to texts, such as env={'N': '4'}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"env is a {type(value).__name__}: {expected}")
    for name, text in value.items():
        if not isinstance(name, str):
            raise ConfigError(f"env has a name of type {type(name).__name__}: {expected}")
        if not name or "=" in name or "\0" in name:
            # What stands after a "=" is most likely the text.
            before, sign, _ = name.partition("=")
            raise ConfigError(
                f"env has the name {shown(before + sign)}: expected names that are not empty and "
                "have no '=' and no NUL character"
            )
        if not isinstance(text, str):
            raise ConfigError(f"env has {shown(name)} of type {type(text).__name__}: {expected}")
        if "\0" in text:
            raise ConfigError(
                f"env has {shown(name)} with a NUL character in its text: leave it out"
            )
    return {str.__str__(name): str.__str__(text) for name, text in value.items()}


def as_devices(value: Any) -> tuple[int, ...] | str | None:
    """The accelerators that ``value`` means: their indices, "cpu", or None.

    Raises:
        ConfigError: it means none of these.
    """
    if value is None:
        return None
    if isinstance(value, str) and value == "cpu":
        return "cpu"
    devices = _as_indices(value)
    if not devices or min(devices) < 0 or len(set(devices)) < len(devices):
        raise ConfigError(
            f"devices={shown(value)}: expected 'cpu', or different indices such as [0, 2]"
        )
    return devices


def _as_indices(value: Any) -> tuple[int, ...]:
    """The whole numbers in ``value``; none where anything else is in it."""
    try:
        parts = [int(part) for part in value.split(",")] if isinstance(value, str) else list(value)
    except (TypeError, ValueError):
        return ()
    indices = [as_index(part) for part in parts]
    return tuple(index for index in indices if index is not None) if None not in indices else ()


def check_enough_devices(wanted: int, available: int) -> None:
    """Refuse more ranks than accelerators of this machine.

    Raises:
        ConfigError: ``wanted`` is more than ``available``.
    """
    check_enough(wanted, available, f"this machine has {available}")


def check_enough(wanted: int, available: int, why: str) -> None:
    """Refuse more ranks than accelerators; the message says ``why`` there are no more.

    Raises:
        ConfigError: ``wanted`` is more than ``available``.
    """
    if wanted > available:
        raise ConfigError(
            f"num_processes={wanted}, but {why}: one accelerator a rank. Ask for "
            f"num_processes={available}, or for devices='cpu', or let ranks share accelerators "
            "with config=LaunchConfig(backend='gloo')"
        )
