"""What the notebook's cells did to libraries, repeated in each rank before it gets the function.

    notebook: cell_setup.py reads the cells --> Step ... with the call ... --> rank: take_over

A fork of the notebook would have all of this; ranks come from a clean process. A step is an
assignment to a library, a call of it, a state, or a whole cell; states.py has the table of the
settings that are known library by library.

A step waits for the module that it changes: where a rank has not imported it, it is repeated right
after the import, so that no rank imports a library for a setting alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from notebook_accel.launch.payload import cells
from notebook_accel.launch.payload.pickling import CallPickler, at_its_name, load
from notebook_accel.system.modules import change_module

# From a module to a value in it: names of attributes, and keys of dictionaries as tuples of one.
Path = tuple["str | tuple[Any]", ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that the notebook has done, for the ranks.

    Attributes:
        module: the module that it changes; "" for none.
    """

    key: str
    label: str
    module: str
    body: bytes


# ---- in the notebook -----------------------------------------------------------------------


def pack_step(
    key: str, label: str, module: str, do: Callable[..., None], *arguments: object
) -> Step:
    """Make a step; raises whatever the pickling of an argument raises."""
    file = io.BytesIO()
    _StepPickler(file).dump((do, arguments))
    return Step(key=key, label=label, module=module, body=file.getvalue())


class _StepPickler(CallPickler):
    """Pickles a library's function that a cell has replaced as the one that the rank still has."""

    def _reduce_definition(self, value: Any) -> Any:
        now = at_its_name(value) if isinstance(value, types.FunctionType) else None
        if now is not None and now is not value:
            return _original, (value.__module__, value.__qualname__)
        return super()._reduce_definition(value)


def value_at(module: Any, path: Path) -> Any:
    """Return the value at a path; raises AttributeError or LookupError where there is none."""
    for part in path:
        module = getattr(module, part) if isinstance(part, str) else module[part[0]]
    return module


# ---- in a rank -----------------------------------------------------------------------------

# What stood at a module's name before a step replaced it, by module and dotted path.
_replaced: dict[tuple[str, str], Any] = {}


def take_over(steps: Iterable[Step], notice: Callable[[str], None]) -> None:
    """Repeat steps in this process, in their order; those whose module is not imported, later."""
    for step in steps:
        if step.module:
            change_module(step.module, partial(_repeat, step, notice))
        else:
            do, arguments = load(step.body)
            do(*arguments)


def _repeat(step: Step, notice: Callable[[str], None], module: Any) -> None:
    try:
        do, arguments = load(step.body)
        do(module, *arguments)
    except Exception as error:  # a library may raise anything; its import must not fail for it
        notice(
            f"`{step.label}`, as the notebook has it, failed in the ranks: "
            f"{type(error).__name__}: {error}"
        )


def assign(module: Any, path: Path, value: object) -> None:
    """Assign a value to a place below a module, unless an equal one is there (a step)."""
    *to_owner, last = path
    owner = value_at(module, tuple(to_owner))
    with contextlib.suppress(AttributeError, LookupError):
        before = value_at(owner, (last,))
        if _is_same(before, value):
            return
        if all(isinstance(part, str) for part in path):
            _replaced.setdefault((module.__name__, ".".join(map(str, path))), before)
    if isinstance(last, str):
        setattr(owner, last, value)
    else:
        owner[last[0]] = value


def refill(module: Any, path: Path, value: Any) -> None:
    """Give an object below a module another one's contents, for all who hold it (a step)."""
    held = value_at(module, path)
    if isinstance(held, (dict, list, set)):
        held.clear()
        (held.extend if isinstance(held, list) else held.update)(value)
    if hasattr(held, "__dict__"):
        vars(held).clear()
        vars(held).update(vars(value))


def call(module: Any, path: Path, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Call a function below a module (a step)."""
    value_at(module, path)(*args, **kwargs)


def run_cell(code: str, source: cells.CellSource) -> None:
    """Run a cell in the rank's ``__main__``, without its prints, which the notebook has shown."""
    cells.install_sources([source])
    compiled = compile(code, source.filename, "exec", dont_inherit=True)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        exec(compiled, cells.main_namespace())


def _original(module: str, name: str) -> Any:
    __import__(module)
    return _replaced.get((module, name)) or attrgetter(name)(sys.modules[module])


def _is_same(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # arrays compare with nothing as a whole
        return False
