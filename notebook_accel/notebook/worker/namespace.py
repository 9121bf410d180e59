"""The names of one rank of a session: what cells find there, and what they leave.

Python keeps them in ``__main__``; this says which the notebook brought, and which were assigned
here since the notebook was told last.
"""

from __future__ import annotations

import functools
import sys
import types
from importlib import import_module
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import rank
from notebook_accel.notebook.used_names import is_history
from notebook_accel.notebook.worker.shell import RankShell, make_shell

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = ["Namespace", "rank_namespace"]

# What every cell finds from the start; an accelerator is made for the first cell that uses one.
_TRAINING = "notebook_accel.training.cell_names"
_AT_ONCE = ("rank", "world_size", "device")
_ACCELERATOR = "accelerator"

_namespace: Namespace | None = None


def rank_namespace() -> Namespace:
    """The names of this rank; the first call makes its shell."""
    global _namespace
    if _namespace is None:
        _namespace = Namespace(make_shell())
    return _namespace


class Namespace:
    """The names of this rank.

    Attributes:
        shell: runs cells on them.
    """

    def __init__(self, shell: RankShell) -> None:
        self.shell = shell
        self._last_push = 0
        self._names: dict[str, Any] = shell.user_ns
        training = import_module(_TRAINING)
        self._names.update({name: getattr(training, name) for name in _AT_ONCE})
        self._reported = self._objects()

    def push(self, names: Mapping[str, Any], fills: Collection[str] = ()) -> None:
        """Take names of the notebook; those in ``fills`` only where there are none."""
        if names:
            self._last_push = rank.current().call
        names = {
            name: value
            for name, value in names.items()
            if name not in fills or name not in self._names
        }
        self._names.update(names)
        self._reported.update({name: id(value) for name, value in names.items()})

    def get_ready(
        self, mentions: Iterable[str], *, renews_group: bool, function: Any = None
    ) -> None:
        """Have there what the next cell needs beside its own names. All ranks call it together.

        Args:
            mentions: names that the cell may use.
            renews_group: make the process group anew, which all ranks had.
            function: what is called in the place of a cell.
        """
        if renews_group:
            for line in import_module("notebook_accel.training.renewal").renew_group():
                rank.current().notice(line)
        mentions = [*mentions, *_names_in(function)]
        if _ACCELERATOR not in self._names and self._may_use(mentions, _ACCELERATOR):
            self._names[_ACCELERATOR] = getattr(import_module(_TRAINING), _ACCELERATOR)
            self._reported[_ACCELERATOR] = id(self._names[_ACCELERATOR])

    def report(self, pull: Iterable[str] = ()) -> dict[str, Any]:
        """What changed since the last report, as arguments of a ``NamesOutcome``.

        Args:
            pull: names of values to give.
        """
        now = self._objects()
        assigned = frozenset(name for name, key in now.items() if self._reported.get(name) != key)
        self._reported = now
        return {
            "assigned": assigned,
            "names": frozenset(now),
            "pulled": {name: self._names[name] for name in pull if name in self._names},
            "last_push": self._last_push,
        }

    def _objects(self) -> dict[str, int]:
        """The object of each name that a person has given, by its identity."""
        hidden = self.shell.user_ns_hidden
        return {
            name: id(value)
            for name, value in self._names.items()
            if name not in hidden and not name.startswith("__") and not is_history(name)
        }

    def _may_use(self, mentions: Iterable[str], name: str) -> bool:
        """Whether ``name`` is mentioned, or used by functions and classes that are mentioned."""
        seen: set[str] = set()
        waiting = list(mentions)
        while waiting:
            mention = waiting.pop()
            if mention == name:
                return True
            if mention not in seen:
                seen.add(mention)
                waiting += _names_in(self._names.get(mention))
        return False


def _names_in(value: Any) -> list[str]:
    """The names that the notebook's code mentions: of a function, a class, or an object of one."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.MethodType):
        value = value.__self__
    if not isinstance(value, (types.FunctionType, type)):
        value = type(value)
    main = sys.modules["__main__"].__name__
    definitions = value.__mro__ if isinstance(value, type) else [value]
    parts = [
        part
        for one in definitions
        if one.__module__ == main
        for part in (vars(one).values() if isinstance(one, type) else [one])
    ]
    codes = [part.__code__ for part in parts if isinstance(part, types.FunctionType)]
    found: list[str] = []
    while codes:
        code = codes.pop()
        found += code.co_names
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return found
