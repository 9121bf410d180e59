"""Single values: read from text, checked, shown. A ConfigError says which name and what instead."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import operator
import re
import reprlib
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

from notebook_accel.errors import ConfigError

_OLDEST_TORCH = (2, 9)
_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on", "y", "t"), True),
    **dict.fromkeys(("0", "false", "no", "off", "n", "f"), False),
}

# YAML's aliases make a value of gigabytes out of 300 bytes.
_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother, _repr.maxlong = 3, 200, 200, 100


@functools.cache
def too_old_torch(needed: tuple[int, int] = _OLDEST_TORCH) -> str:
    """Return what to say of an installed torch older than ``needed``; "" if it is new enough."""
    try:
        found = importlib.metadata.version("torch")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""  # built from its sources, or on the path without being installed, or unreadable
    release = re.match(r"(\d+)\.(\d+)", found)
    if release is None or (int(release[1]), int(release[2])) >= needed:
        return ""
    bound = ".".join(map(str, needed))
    return (
        f"torch {found} is installed, and torch {bound} or newer is needed: "
        f"pip install 'torch>={bound}', then restart the kernel"
    )


def as_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """Return a whole number from ``least`` to ``most``, also numpy's; no bools."""
    number = as_index(value)
    if number is None or number < least or (most is not None and number > most):
        last = "or more" if most is None else f"to {most}"
        raise ConfigError(f"{name}={shown(value)}: expected a whole number, {least} {last}")
    return number


def as_flag(name: str, value: Any) -> bool:
    """Return ``value``, which must be True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: expected True or False")
    return value


def as_positive(name: str, value: Any) -> float:
    """An int stays one, any other number becomes a float."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise ConfigError(f"{name}={shown(value)}: expected a number above 0")
    return value if type(value) is int else float(value)


def as_text(name: str, value: Any) -> str:
    """Return a plain str, also of a member of a str enum."""
    if not isinstance(value, str):
        raise ConfigError(f"{name}={shown(value)}: expected text")
    return str.__str__(value)


def as_address(name: str, value: Any) -> str:
    """Return a host name or an IPv4 address, without surrounding spaces."""
    address = as_text(name, value).strip()
    if not re.fullmatch(r"[A-Za-z0-9._-]+", address):
        raise ConfigError(f"{name}={shown(value)}: expected a host name or an IPv4 address")
    return address


def as_index(value: Any) -> int | None:
    """Return an integer, also numpy's; None for a bool and any other value."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_seconds(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Return seconds from 0 on (``above_zero``: more), neither NaN nor a bool."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value < 0 or (above_zero and not value):
        expected = "a number of seconds above 0" if above_zero else "seconds, 0 or more"
        raise ConfigError(f"{name}={shown(value)}: expected {expected}")
    return float(value)


def as_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return ``value``, which must be one of ``choices``, as a plain str."""
    if not isinstance(value, str) or value not in choices:
        named = ", ".join(map(repr, choices))
        raise ConfigError(f"{name}={shown(value)}: expected one of {named}")
    return next(choice for choice in choices if choice == value)


def as_env(name: str, value: Any) -> dict[str, str]:
    """Return environment variables; errors show no values, which may be secrets."""
    expected = "expected a mapping of names to texts, such as env={'N': '4'}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a {type(value).__name__}: {expected}")
    for variable, text in value.items():
        if not isinstance(variable, str) or not isinstance(text, str):
            named = shown(variable) if isinstance(variable, str) else "a name"
            kind = type(text if isinstance(variable, str) else variable).__name__
            raise ConfigError(f"env has {named} of type {kind}: {expected}")
        # What stands after a "=" is most likely the text.
        before, sign, _ = variable.partition("=")
        if not before or sign or "\0" in variable + text:
            raise ConfigError(
                f"env has {shown(before + sign)}: expected a name that is not empty and has no "
                "'=', and no NUL character in it or its text"
            )
    return {str.__str__(each): str.__str__(text) for each, text in value.items()}


def as_devices(name: str, value: Any) -> tuple[int, ...] | str:
    """Return accelerators from a list or "0,2", each once; or "cpu"."""
    if isinstance(value, str) and value == "cpu":
        return "cpu"
    found: list[int | None] = []
    with contextlib.suppress(TypeError, ValueError):
        parts = map(int, value.split(",")) if isinstance(value, str) else value
        found = [as_index(part) for part in parts]
    devices = tuple(index for index in found if index is not None and index >= 0)
    if not devices or len(set(devices)) < len(found):
        raise ConfigError(
            f"{name}={shown(value)}: expected 'cpu', or different indices such as [0, 2]"
        )
    return devices


def check_enough(wanted: int, available: int, why: str) -> None:
    """Raise ConfigError for too few accelerators; ``why`` is the cause: "devices=[0, 1]"."""
    if wanted > available:
        raise ConfigError(
            f"num_processes={wanted}, but {why}: one accelerator a rank. Ask for "
            f"num_processes={available}, or for devices='cpu', or let ranks share accelerators "
            "with config=LaunchConfig(backend='gloo')"
        )


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
