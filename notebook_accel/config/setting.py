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
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from notebook_accel.config.checks import as_choice, as_count, as_flag, as_positive, as_text
from notebook_accel.text_values import value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Class = TypeVar("_Class", bound=type)
_ROW = "setting"


# How a value is checked where its row names no check and no choices.
_CHECKS: Mapping[Any, Callable[[str, Any], Any]] = {
    bool: as_flag,
    int: as_count,
    float: as_positive,
    str: as_text,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All facts about one setting, which :func:`setting` stores in a field's metadata.

    Attributes:
        name: name of the field.
        kind: type of the value; text from YAML, variables and the form is converted to this type.
        default: default of the field.
        about: what the setting does, in one or two sentences without the final full stop.
        check: function called as ``check(name, value)``, with the name for errors; returns the
            value in its plain form, or raises ConfigError. None checks the type ``kind``. With
            ``choices``, ``check`` is not used.
        choices: the allowed texts, or a function that returns them; empty allows any value.
        label: label in the form; "" shows the name.
        unset: what it means to leave the setting at its default.
        variable: environment variable of Accelerate's launcher; "" if there is none.
        own: this package's environment variable; None for ``NOTEBOOK_ACCEL_<NAME>``, "" for none.
        yaml: name of its entry in the YAML of ``accelerate config``. "" means that there is none;
            an option of a plugin then has the entry of the option's own name.
        is_for_ranks: whether ranks read the setting from their environment.
        is_first: whether the form shows the setting before the user unfolds the form.
        numbers: numbers that Accelerate's YAML may have in place of the texts in ``choices``, in
            the same order.
        or_choice_of: name of another setting. If Accelerate's YAML gives this setting a text that
            is one of the other's choices, the other is set instead.
        entry: dotted name of the entry in DeepSpeed's configuration; "" if there is none.
        fallback: for a plugin's option, the value if neither the field nor a variable sets it.
    """

    name: str = ""
    kind: Any = None
    default: Any = None
    about: str
    check: Callable[[str, Any], Any] | None = None
    choices: Sequence[str] | Callable[[], Sequence[str]] = ()
    label: str = ""
    unset: str = ""
    variable: str = ""
    own: str | None = None
    yaml: str = ""
    is_for_ranks: bool = False
    is_first: bool = False
    numbers: tuple[int, ...] = ()
    or_choice_of: str = ""
    entry: str = ""
    fallback: Any = None

    def checked(self, name: str, value: Any) -> Any:
        """Check a value and return it in its plain form; None is valid if it is the default.

        Raises:
            ConfigError: the value is invalid; the message calls the setting ``name``.
        """
        if value is None and self.default is None:
            return None
        if self.texts:
            return as_choice(name, value, self.texts)
        check = self.check or _CHECKS.get(self.kind)
        return value if check is None else check(name, value)

    @property
    def texts(self) -> Sequence[str]:
        """The allowed texts; empty if any value is allowed."""
        return self.choices() if callable(self.choices) else self.choices

    def from_text(self, text: Any) -> Any:
        """Convert text from YAML, a variable or the form to this setting's type.

        An int may stand for a flag or a choice, as in YAML. Text that cannot be converted, and
        other values that are no text, are returned unchanged: :meth:`checked` refuses invalid ones.
        """
        choices = self.texts
        if type(text) is int and (choices or self.kind is bool):
            text = str(text)
        if not isinstance(text, str):
            return text
        lowered = {choice.lower(): choice for choice in choices}
        lowered.update(zip(map(str, self.numbers), choices, strict=False))
        return lowered.get(text.strip().lower(), value_of(text, self.kind))

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of this setting's environment variables: this package's, then Accelerate's."""
        own = f"NOTEBOOK_ACCEL_{self.name.upper()}" if self.own is None else self.own
        return tuple(filter(None, (own, self.variable)))

    def variable_set(self, environment: Mapping[str, str]) -> str | None:
        """Return the first of :attr:`variables` that is set and not blank; None if none is."""
        return next((name for name in self.variables if environment.get(name, "").strip()), None)

    def from_environment(self) -> Any:
        """Return the value from this process's environment; :attr:`fallback` if no variable is set.

        Raises:
            ConfigError: the variable's text is invalid.
        """
        variable = self.variable_set(os.environ)
        if variable is None:
            return self.fallback
        return self.checked(variable, self.from_text(os.environ[variable].strip()))

    @property
    def text(self) -> str:
        """What the setting does and what its default means, for ``help()``."""
        unset = f" {self.default}: {self.unset}." if self.unset else ""
        variable = f" Variable {self.variable}." if self.variable else ""
        return f"{self.about}.{unset}{variable}"


def setting(default: Any = None, **row: Any) -> Any:
    """Return a dataclass field that is a setting.

    Args:
        default: default of the field.
        row: attributes of :class:`Setting`, and ``shows``: False leaves the value out of the
            dataclass's ``repr``.
    """
    shows = row.pop("shows", True)
    metadata = {_ROW: Setting(default=default, **row)}
    return field(default=default, repr=shows, metadata=metadata)


@functools.cache
def settings_of(kind: Any) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by name, in the order of its fields.

    Fields that were not made by :func:`setting` are left out.
    """
    rows = {one.name: one.metadata[_ROW] for one in fields(kind) if _ROW in one.metadata}
    # Types that only a type checker can import are given in the row.
    hints = get_type_hints(kind) if any(row.kind is None for row in rows.values()) else {}
    return {
        name: replace(row, name=name, kind=row.kind or hints[name]) for name, row in rows.items()
    }


def documented(kind: _Class) -> _Class:
    """Append the settings of a class to its docstring, for ``help()`` (a class decorator).

    Each setting is listed with its type, default and meaning.
    """
    rows = [
        f"{one.name}: {one.type} = {one.default!r}\n"
        + textwrap.indent(textwrap.fill(one.metadata[_ROW].text, 90), "    ")
        for one in fields(kind)
        if _ROW in one.metadata
    ]
    head = inspect.cleandoc(kind.__doc__ or "")
    kind.__doc__ = f"{head}\n\nSettings:\n{textwrap.indent(chr(10).join(rows), '    ')}\n"
    return kind
