"""One setting is one row: its check, texts and names stand at the field of its dataclass.

    @dataclass
    class LaunchConfig:
        grace: float = setting(10.0, check=as_seconds, label="Grace", about="Seconds that ...")

Environment, YAML, form, ``help()`` and documentation read the rows by :func:`settings_of`; there is
no second list of settings.
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

__all__ = ["Setting", "documented", "setting", "settings_of"]

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
    """What is known of one setting.

    Attributes:
        name: of the field.
        kind: its type; texts of YAML, variables and the form are read as that.
        default: of the field.
        about: one sentence or two on what it does, without the last full stop.
        check: called with a name for errors and a value that is not None; gives the value in its
            plain form, or raises ConfigError. None checks for the choices, or the type.
        choices: the texts that it may be, or a function that gives them; none for any.
        label: what stands before it in the form; "" is the name.
        unset: what leaving it open means.
        variable: the variable of Accelerate's launcher, if there is one.
        own: the package's own variable, "" for none; None is ``NOTEBOOK_ACCEL_<NAME>``.
        yaml: its name in the YAML of ``accelerate config``, where that is another one.
        is_for_ranks: whether ranks read it from variables.
        is_first: whether the form shows it unfolded.
        numbers: torch's numbers of the choices, which that YAML may have in their place.
        or_choice_of: another setting, whose choices that YAML may have in this one's place.
        entry: of DeepSpeed's configuration.
        fallback: the value where neither the field nor the variable says one.
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
        """Return the value in its plain form; None stays None where that leaves the setting open.

        Raises:
            ConfigError: it makes no sense; the message calls it ``name``.
        """
        if value is None and self.default is None:
            return None
        if self.texts:
            return as_choice(name, value, self.texts)
        check = self.check or _CHECKS.get(self.kind)
        return value if check is None else check(name, value)

    @property
    def texts(self) -> Sequence[str]:
        """The texts that it may be; none for any."""
        return self.choices() if callable(self.choices) else self.choices

    def from_text(self, text: Any) -> Any:
        """Return the value that YAML, a variable or the form means, which may have written a flag
        or a number as text; the text itself where it is none."""
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
        """The variables that may say it: the package's own, then Accelerate's."""
        own = f"NOTEBOOK_ACCEL_{self.name.upper()}" if self.own is None else self.own
        return tuple(filter(None, (own, self.variable)))

    def variable_set(self, environment: Mapping[str, str]) -> str | None:
        """Return the first of its variables that has a text; None where none has."""
        return next((name for name in self.variables if environment.get(name, "").strip()), None)

    def from_environment(self) -> Any:
        """Return what the environment says, or the fallback.

        Raises:
            ConfigError: the variable's text makes no sense.
        """
        variable = self.variable_set(os.environ)
        if variable is None:
            return self.fallback
        return self.checked(variable, self.from_text(os.environ[variable].strip()))

    @property
    def text(self) -> str:
        """What it does and what leaving it open means, for ``help()``."""
        unset = f" {self.default}: {self.unset}." if self.unset else ""
        variable = f" Variable {self.variable}." if self.variable else ""
        return f"{self.about}.{unset}{variable}"


def setting(default: Any = None, **row: Any) -> Any:
    """Return a dataclass field that is a setting; the arguments are those of :class:`Setting`."""
    shows = row.pop("shows", True)
    metadata = {_ROW: Setting(default=default, **row)}
    return field(default=default, repr=shows, metadata=metadata)


@functools.cache
def settings_of(kind: Any) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by their names, in the order of its fields."""
    rows = {one.name: one.metadata[_ROW] for one in fields(kind) if _ROW in one.metadata}
    # Types that only a type checker can import are given in the row.
    hints = get_type_hints(kind) if any(row.kind is None for row in rows.values()) else {}
    return {
        name: replace(row, name=name, kind=row.kind or hints[name]) for name, row in rows.items()
    }


def documented(kind: _Class) -> _Class:
    """Class decorator: add the settings with their types, defaults and meanings to the docstring,
    so that ``help()`` shows them."""
    rows = [
        f"{one.name}: {one.type} = {one.default!r}\n"
        + textwrap.indent(textwrap.fill(one.metadata[_ROW].text, 90), "    ")
        for one in fields(kind)
        if _ROW in one.metadata
    ]
    head = inspect.cleandoc(kind.__doc__ or "")
    kind.__doc__ = f"{head}\n\nSettings:\n{textwrap.indent(chr(10).join(rows), '    ')}\n"
    return kind
