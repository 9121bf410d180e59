"""Knobs: values of a training that a person changes while it goes on.

``run.set(lr=1e-4)``, or a control of the panel, changes a knob on all ranks at the same step.
Outside of a launch a knob is its default. ``checked`` says which values a knob may have: the
notebook asks it in ``run.set``, a rank where it makes a knob.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from notebook_accel import wire
from notebook_accel.errors import ConfigError
from notebook_accel.rank.this_rank import current


class Knob:
    """A value that changes while a training goes on; ``accelerator.knob`` makes it."""

    def __init__(self, made: wire.KnobMade, limits: dict[str, Any]) -> None:
        self.name = made.name
        self.value = made.value
        self._limits = limits
        self._on_change: Callable[[wire.KnobValue], object] | None = None
        self._made = made

    def take(self, value: object) -> None:
        """Take a new value, at a common step of all ranks."""
        context = current()
        if not self.accept(value):
            return
        if context.rank == 0:
            if not isinstance(self.value, str):
                context.metric({f"knob/{self.name}": float(self.value)}, context.num_steps)
            self.report()
        if self._on_change is not None:
            self._on_change(self.value)

    def accept(self, value: object) -> bool:
        """Take a value if it fits; one that was asked before the knob was made may not."""
        try:
            self.value = checked(self._made, value)
        except ConfigError as error:
            # No reason to end a training.
            current().notice(f"{error}; it stays {self.value!r}")
            return False
        return True

    def report(self) -> None:
        """Tell the notebook of the knob."""
        current().report(wire.KnobMade, name=self.name, value=self.value, **self._limits)

    def __repr__(self) -> str:
        return f"<Knob {self.name}={self.value!r}>"


def make_knob(
    name: str,
    default: wire.KnobValue,
    on_change: Callable[[wire.KnobValue], object] | None,
    **limits: Any,
) -> Knob:
    """Return the knob of this name; ``Accelerator.knob`` says more."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"knob({name!r}): its name is a text, such as 'lr'")
    default = plain(name, default)
    _check(name, default, limits["low"], limits["high"], log=limits["log"])
    made = wire.KnobMade(name=name, value=default, **limits)
    checked(made, default)
    context = current()
    known: Knob | None = context.knobs_made.get(name)
    if known is None:
        known = context.knobs_made[name] = Knob(made, limits)
        if name in context.knobs:  # set before it was made, or loaded from a checkpoint
            if name in context.first_knobs:  # a clone's, which has nothing to lose yet
                checked(made, context.knobs[name])
            known.accept(context.knobs[name])
        if context.rank == 0:
            known.report()
    elif (type(known.value), known._limits) != (type(default), limits):
        raise ConfigError(
            f"knob({name!r}): it was made before with another type, range or choices; take another "
            "name for another knob"
        )
    if on_change is not None:
        known._on_change = on_change
    return known


def _check(name: str, default: object, low: float | None, high: float | None, *, log: bool) -> None:
    if (log and (low is None or low <= 0)) or (low is not None and high is not None and low > high):
        raise ConfigError(
            f"knob({name!r}): low={low!r}, high={high!r}, log={log!r}: low is at most high, and "
            "above 0 for a logarithmic scale"
        )
    ends = [end for end in (low, high) if end is not None and end % 1]
    if ends and type(default) is int:
        raise ConfigError(
            f"knob({name!r}, {default!r}): the default is a whole number, and {ends[0]!r} is not; "
            f"take {float(default)!r} for a knob of any number"
        )


_KINDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text"}


def plain(name: str, value: object) -> wire.KnobValue:
    """Return a value of a knob; a number of NumPy's or torch's becomes one of Python's."""
    made: Any = value
    with suppress(TypeError, ValueError, RuntimeError):  # it has several
        made = made.item() if hasattr(made, "item") else made
    if type(made) not in _KINDS:
        raise ConfigError(
            f"knob {name!r}: {value!r} was given, and a knob is a number, a text, True or False; "
            "for anything else take a number or text that stands for it"
        )
    return made  # type: ignore[no-any-return]


def checked(knob: wire.KnobMade, value: object) -> wire.KnobValue:
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
