"""The widgets of a picker's form: one row a setting, made from the setting's own type.

    label | widget | what is wrong with it

A row's value is what a person typed, as the type wants it; None where the row is left empty. What
cannot be read stays text: the settings themselves refuse it, with their own words.
"""

from __future__ import annotations

import contextlib
import json
from itertools import combinations
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accel.config import LaunchConfig, settings_of
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.notebook.markup import element

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_accel.config.plugins import Plugin
    from notebook_accel.config.setting import Setting

__all__ = [
    "ChoiceRow",
    "FlagRow",
    "LinesRow",
    "Row",
    "StrategyRow",
    "TextRow",
    "plugin_rows",
    "setting_rows",
]

_DATA_PARALLEL = "Data parallel (DDP)"
_OPEN = ""


class Row:
    """One setting in the form, and the base of all kinds of rows.

    Args:
        name: of the setting.
        label: what stands before it.
        about: one sentence on what it does.
        widget: where a person gives the value.
    """

    def __init__(self, name: str, label: str, about: str, widget: Any) -> None:
        self.name = name
        self.widget = widget
        widget.tooltip = about
        widget.add_class("na-field")
        # The label belongs to the widget for a screen reader: its own description, widened by CSS.
        widget.description = label
        widget.style.description_width = "240px"
        self._note = ipywidgets.HTML()
        self._note.add_class("na-note")
        self._about = about
        self.box = ipywidgets.HBox([widget, self._note])
        self.box.add_class("na-row")
        self.say(None)

    @property
    def value(self) -> Any:
        """What the setting is to be; None leaves it open."""
        return self.widget.value

    @value.setter
    def value(self, value: Any) -> None:
        self.widget.value = value

    def on_change(self, call: Callable[[], None]) -> None:
        """Call ``call`` after each change."""
        self.widget.observe(lambda _: call(), names="value")

    def say(self, text: str | None, kind: str = "na-wrong") -> None:
        """Show what is wrong with the value beside it; None: what the setting does.

        Args:
            text: what is wrong.
            kind: the class of the text: "na-wrong", or "na-warn" for what is worth a thought.
        """
        kind, role = ("na-about", None) if text is None else (kind, "alert")
        self._note.value = str(element("span", text or self._about, class_=kind, role=role))


class TextRow(Row):
    """Text, or a number, which ``read`` makes of the text."""

    def __init__(
        self, name: str, label: str, about: str, *, default: str, read: Callable[[str], Any]
    ) -> None:
        # A value that is sent with each key, so that what is wrong is told while one types.
        widget = ipywidgets.Text(placeholder=default, continuous_update=True)
        super().__init__(name, label, about, widget)
        self._read = read

    @property
    def value(self) -> Any:
        text = self.widget.value.strip()
        return self._read(text) if text else None

    @value.setter
    def value(self, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        self.widget.value = "" if value is None else str(value)


class ChoiceRow(Row):
    """One of several; the first, ``default``, leaves the setting open."""

    def __init__(
        self, name: str, label: str, about: str, *, default: str, choices: Sequence[Any]
    ) -> None:
        # None would mean that nothing is chosen, and be shown as an empty field.
        options = [(default, _OPEN), *((str(choice), choice) for choice in choices)]
        super().__init__(name, label, about, ipywidgets.Dropdown(options=options, value=_OPEN))

    @property
    def value(self) -> Any:
        return None if self.widget.value == _OPEN else self.widget.value

    @value.setter
    def value(self, value: Any) -> None:
        self.widget.value = _OPEN if value is None else value


class FlagRow(Row):
    """Yes or no."""

    def __init__(self, name: str, label: str, about: str) -> None:
        super().__init__(name, label, about, ipywidgets.Checkbox(indent=True))

    @property
    def value(self) -> Any:
        return True if self.widget.value else None

    @value.setter
    def value(self, value: Any) -> None:
        self.widget.value = bool(value)


class LinesRow(Row):
    """Names with values, one ``NAME=value`` a line; a value with line breaks as JSON has it."""

    def __init__(self, name: str, label: str, about: str) -> None:
        widget = ipywidgets.Textarea(placeholder="NAME=value", rows=2, continuous_update=True)
        super().__init__(name, label, about, widget)

    @property
    def value(self) -> Any:
        lines = [line.strip() for line in self.widget.value.splitlines() if line.strip()]
        pairs = (line.partition("=")[::2] for line in lines)
        return {name: _value_of_line(text) for name, text in pairs} or None

    @value.setter
    def value(self, value: Any) -> None:
        lines = (f"{name}={_line_of_value(text)}" for name, text in (value or {}).items())
        self.widget.value = "\n".join(lines)


def _line_of_value(value: str) -> str:
    # What a line would not give back as it is: breaks, blanks at its ends, quotes as JSON's.
    is_line = value == value.strip() and len(value.splitlines()) <= 1
    return value if is_line and not value.startswith('"') else json.dumps(value)


def _value_of_line(text: str) -> str:
    if text.startswith('"'):
        with contextlib.suppress(ValueError):
            return str(json.loads(text))
    return text


class StrategyRow(Row):
    """Which kinds of parallelism: the names of their plugins, none for data parallelism alone."""

    def __init__(self) -> None:
        chosen = [
            names
            for number in range(1, len(PLUGINS) + 1)
            for names in combinations(PLUGINS, number)
            if number == 1 or all(PLUGINS[name].composes for name in names)
        ]
        options: list[tuple[str, tuple[str, ...]]] = [(_DATA_PARALLEL, ())]
        options += [(" + ".join(PLUGINS[name].title for name in names), names) for names in chosen]
        widget = ipywidgets.Dropdown(options=options, value=())
        super().__init__("strategy", "Strategy", "How ranks share the model and the data.", widget)


def setting_rows() -> dict[str, Row]:
    """A row for each setting of ``LaunchConfig`` that is no plugin, by its name."""
    return {
        name: LinesRow(name, one.label, f"{one.about}.") if name == "env" else _row(one)
        for name, one in settings_of(LaunchConfig).items()
        if name not in PLUGINS
    }


def plugin_rows(plugin: Plugin) -> list[Row]:
    """A row for each option of a plugin."""
    return [_row(option) for option in plugin.options.values()]


def _row(one: Setting) -> Row:
    # An option is called by its own name, as the documentation of every library has it.
    label, about = one.label or one.name, f"{one.about}.".replace("``", "")
    default = one.unset or ("default" if one.default is None else str(one.default))
    if one.kind is bool and one.default is False:
        return FlagRow(one.name, label, about)
    if one.texts or one.kind is bool:
        choices = [choice for choice in one.texts or (True, False) if choice != default]
        return ChoiceRow(one.name, label, about, default=default, choices=choices)
    return TextRow(one.name, label, about, default=default, read=one.from_text)
