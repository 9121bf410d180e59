"""The texts of the picker: what a machine has, code and YAML of settings, whose row an error is."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import yaml

from notebook_accel.notebook.markup import Markup, element, join

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.machine import Machine
    from notebook_accel.notebook.picker_fields import Row

__all__ = [
    "Arguments",
    "as_code",
    "as_yaml",
    "devices_line",
    "is_of_notebook",
    "read_arguments",
    "row_of_error",
]

_GIB = 1024**3


@dataclass(frozen=True)
class Arguments:
    """What a function is called with.

    Attributes:
        text: as it was typed, between the brackets of a call.
        args, kwargs: what that means.
    """

    text: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def devices_line(machine: Machine | None) -> Markup:
    """What trains on this machine; None: it is being found out."""
    if machine is None:
        return element("div", "Looking for devices …", class_="na-devices na-about", role="status")
    host = (
        f"{machine.num_cores} CPU cores, {machine.memory / _GIB:.0f} GB of memory, "
        f"{machine.free_memory / _GIB:.0f} GB of it free"
    )
    if machine.error:
        lines: list[str] = [element("span", machine.error, class_="na-wrong"), host]
    elif not machine.devices:
        lines = [f"No accelerator: ranks train on the CPU ({host})"]
    else:
        named = [
            join([element("b", str(device.index)), f" {device.name}{_memory(device.memory)}"])
            for device in machine.devices
        ]
        lines = [*named, host]
    rows = join(element("div", line) for line in lines)
    return element("div", rows, class_="na-devices", role="status", aria_label="Devices")


def _memory(num_bytes: int) -> str:
    return f", {num_bytes / _GIB:.0f} GB" if num_bytes else ""


def as_code(config: LaunchConfig, function: str | None, arguments: str) -> str:
    """The cell that launches what the form's Launch does.

    Raises:
        SyntaxError: ``arguments`` is no list of arguments.
    """
    given = config.to_dict().items()
    settings = "".join(f"    {name}={_expression(value)},\n" for name, value in given)
    made = f"LaunchConfig(\n{settings})" if settings else "LaunchConfig()"
    call = f"notebook_launcher({function or 'train'}, {_given(arguments)}config=config)"
    return (
        "from notebook_accel import LaunchConfig, notebook_launcher\n\n"
        f"config = {made}\nrun = {call}"
    )


def _expression(value: object) -> str:
    """``repr(value)``, in which infinite numbers are Python's as well."""
    if isinstance(value, dict):
        items = (f"{key!r}: {_expression(each)}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    return 'float("inf")' if value == math.inf else repr(value)


def _given(arguments: str) -> str:
    call = _parse(arguments)
    parts = [ast.unparse(each) for each in call.args]
    args = f"args=({', '.join(parts)},), " if parts else ""
    # ``**more`` has no name of its own.
    named = ", ".join(
        f"{each.arg!r}: {ast.unparse(each.value)}" if each.arg else f"**{ast.unparse(each.value)}"
        for each in call.keywords
    )
    return args + (f"kwargs={{{named}}}, " if named else "")


def as_yaml(config: LaunchConfig) -> str:
    """The file that means the same."""
    settings = config.to_dict()
    if not settings:
        return "# every setting is at its default"
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip()


def read_arguments(text: str, namespace: Mapping[str, Any]) -> Arguments:
    """The arguments that ``text`` gives, as between the brackets of a call in the notebook.

    Raises:
        SyntaxError: it is no list of arguments.
        Exception: what an expression in it raises.
    """
    _parse(text)
    scope = {
        **namespace,
        "_notebook_accel_arguments": lambda *args, **kwargs: Arguments(text, args, kwargs),
    }
    found: Arguments = eval(f"_notebook_accel_arguments({text})", scope)
    return found


def _parse(text: str) -> ast.Call:
    try:
        call = ast.parse(f"_({text})", mode="eval").body
    except SyntaxError:
        call = None
    # "1) + (2" would parse as well.
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise SyntaxError(f"Arguments: {text!r} is no list of arguments, such as 3e-4, epochs=2")
    return call


def is_of_notebook(name: str, value: object) -> bool:
    """Whether a variable is a function that a cell has defined, and that a person would launch."""
    return (
        isinstance(value, FunctionType)
        and not name.startswith("_")
        and value.__module__ == "__main__"
    )


def row_of_error(
    text: str, rows: Mapping[str, Row], plugins: Mapping[str, Sequence[Row]]
) -> Row | None:
    """The row that an error's text is about: it starts with the setting; None for none of them."""
    found = re.match(r"(\w+)(?:\['(\w+)'\])?[= ]", text)
    if found is None:
        return None
    name, option = found.groups()
    if option is not None and name in plugins:
        return next((row for row in plugins[name] if row.name == option), None)
    return rows.get(name)
