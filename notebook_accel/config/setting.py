"""Declares each setting once, as a dataclass field with its check, texts and other names.

    @dataclass
    class LaunchConfig:
        grace: float = setting(10.0, check=as_seconds, label="Grace", about="Seconds that ...")

The code for environment variables, YAML, the form, ``help()`` and the documentation gets all
settings from :func:`settings_of`, so there is no second list to keep up to date.
"""

from __future__ import annotations

import functools
import inspect
import os
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from notebook_accel.config.checks import (
    as_choice,
    as_count,
    as_flag,
    as_positive,
    as_text,
    value_of,
)

_Class = TypeVar("_Class", bound=type)
_ROW = "setting"


# How a value is checked where its row names no check and no choices.
_CHECKS: Mapping[type, Callable[[str, Any], Any]] = {
    bool: as_flag,
    int: as_count,
    float: as_positive,
    str: as_text,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All facts about one setting, which :func:`setting` stores in a field's metadata.

    Attributes:
        kind: type to which text from YAML, variables and the form is converted; None takes that of
            the field, if it is one of the four of ``_CHECKS``, else ``str``.
        about: what it does, in one or two sentences without the final full stop.
        check: ``check(name, value)`` returns the plain value, or raises ConfigError; None checks
            ``kind``. Not used with ``choices``.
        choices: the allowed texts; empty allows any value.
        label: in the form; "" shows the name.
        unset: what it means to leave the setting at its default.
        variable: of Accelerate's launcher; "" if there is none, or if ``prefix`` makes it.
        prefix: of a variable that has the name of the field behind it.
        own: our variable; None for ``NOTEBOOK_ACCEL_<NAME>``, "" for none.
        yaml: entry of ``accelerate config``; "" for none (a plugin's option: its own name).
        is_for_ranks: whether ranks read the setting from their environment.
        is_first: whether the form shows it before it is unfolded.
        numbers: what Accelerate's YAML may have in place of ``choices``, in the same order.
        or_choice_of: the setting that takes a text of Accelerate's YAML that is its choice.
        entry: dotted entry of DeepSpeed's configuration; "" if there is none.
        fallback: a plugin's option's value if neither the field nor a variable sets it.
    """

    name: str = ""
    kind: Any = None
    default: Any = None
    about: str
    check: Callable[[str, Any], Any] | None = None
    choices: Collection[str] = ()
    label: str = ""
    unset: str = ""
    variable: str = ""
    prefix: str = ""
    own: str | None = None
    yaml: str = ""
    is_for_ranks: bool = False
    is_first: bool = False
    numbers: tuple[int, ...] = ()
    or_choice_of: str = ""
    entry: str = ""
    fallback: Any = None

    def checked(self, name: str, value: Any) -> Any:
        """Return a value in its plain form, the default as it is; ConfigError calls it ``name``."""
        if value is None and self.default is None:
            return None
        if self.choices:
            return as_choice(name, value, self.choices)
        check = self.check or _CHECKS.get(self.kind)
        return value if check is None else check(name, value)

    def from_text(self, text: Any) -> Any:
        """Convert text, or an int for a flag or choice; :meth:`checked` refuses the rest."""
        if type(text) is int and (self.choices or self.kind is bool):
            text = str(text)
        if not isinstance(text, str):
            return text
        lowered = {choice.lower(): choice for choice in self.choices}
        lowered.update(zip(map(str, self.numbers), self.choices, strict=False))
        return lowered.get(text.strip().lower(), value_of(text, self.kind))

    @property
    def variables(self) -> tuple[str, ...]:
        """This package's, then Accelerate's."""
        own = f"NOTEBOOK_ACCEL_{self.name.upper()}" if self.own is None else self.own
        return tuple(filter(None, (own, self.variable)))

    def variable_set(self, environment: Mapping[str, str]) -> str | None:
        """Return the first of :attr:`variables` that is set and not blank; None if none is."""
        return next((name for name in self.variables if environment.get(name, "").strip()), None)

    def from_environment(self) -> Any:
        """Return :attr:`fallback` if no variable is set; ConfigError for an invalid text."""
        variable = self.variable_set(os.environ)
        if variable is None:
            return self.fallback
        return self.checked(variable, self.from_text(os.environ[variable].strip()))

    @property
    def text(self) -> str:
        unset = f" {self.default}: {self.unset}." if self.unset else ""
        variable = f" Variable {self.variable}." if self.variable else ""
        return f"{self.about}.{unset}{variable}"


def setting(default: Any = None, **row: Any) -> Any:
    """Return a field by attributes of :class:`Setting`; ``shows=False``: not in the repr."""
    shows = row.pop("shows", True)
    metadata = {_ROW: Setting(default=default, **row)}
    return field(default=default, repr=shows, metadata=metadata)


@functools.cache
def settings_of(kind: Any) -> Mapping[str, Setting]:
    """Return settings by name, in order; fields not made by :func:`setting` are left out."""
    kinds = {each.__name__: each for each in _CHECKS}
    rows: dict[str, Setting] = {}
    for one in fields(kind):
        if _ROW in one.metadata:
            row: Setting = one.metadata[_ROW]
            variable = row.variable or (row.prefix and f"{row.prefix}{one.name.upper()}")
            type_ = row.kind or kinds.get(str(one.type).removesuffix(" | None"), str)
            rows[one.name] = replace(row, name=one.name, variable=variable, kind=type_)
    return rows


def documented(kind: _Class) -> _Class:
    """Append the settings of a class to its docstring, with types and defaults, for ``help()``."""
    rows = [
        f"{one.name}: {one.type} = {one.default!r}\n"
        + textwrap.indent(textwrap.fill(settings_of(kind)[one.name].text, 90), "    ")
        for one in fields(kind)
        if _ROW in one.metadata
    ]
    head = inspect.cleandoc(kind.__doc__ or "")
    kind.__doc__ = f"{head}\n\nSettings:\n{textwrap.indent(chr(10).join(rows), '    ')}\n"
    return kind
