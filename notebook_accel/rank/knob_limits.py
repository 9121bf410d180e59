"""Which values a knob may have: the notebook asks it in ``run.set``, a rank where it makes one."""

from __future__ import annotations

import math
from typing import Any

from notebook_accel.errors import ConfigError
from notebook_accel.wire import KnobMade, KnobValue

_KINDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text"}


def checked(knob: KnobMade, value: object) -> KnobValue:
    """Return a value for a knob, in the type that the knob has."""
    kind = type(knob.value)
    is_number = kind in (int, float)
    try:
        # NumPy's and torch's numbers as well; a bool is no number here, nor is 0.5 a whole one.
        is_taken = not is_number or isinstance(value, (bool, str))
        made: Any = value if is_taken else kind(value)  # type: ignore[call-overload, arg-type]
        fits = type(made) is kind and (not is_number or made == value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        fits = False
    if not fits or (kind is float and not math.isfinite(made)):
        because = f", as {knob.value!r} is: {float(knob.value)!r} takes any" if kind is int else ""
        raise ConfigError(
            f"knob {knob.name!r}: {value!r} was given, and {_KINDS[kind]} is expected{because}"
        )
    if knob.choices and made not in knob.choices:
        raise ConfigError(f"knob {knob.name!r}: {value!r} is none of its choices {knob.choices}")
    low = -math.inf if knob.low is None else knob.low
    high = math.inf if knob.high is None else knob.high
    if is_number and not low <= made <= high:
        raise ConfigError(f"knob {knob.name!r}: {value!r} is not between {low:g} and {high:g}")
    return made  # type: ignore[no-any-return]
