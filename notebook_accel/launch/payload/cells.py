"""Makes the notebook's cells known in a rank: sources, labels in tracebacks, ``__main__``."""

from __future__ import annotations

import builtins
import linecache
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CellSource:
    """The source of a notebook cell, sent to the ranks for their tracebacks."""

    filename: str
    label: str
    text: str


# The name in ``__main__`` under which fill_main notes what it put there.
_FILLED = "__notebook_accel_filled__"

_labels: dict[str, str] = {}
_FILE = re.compile(r'File "([^"\n]+)"(?=, line \d)')


def install_sources(sources: Sequence[CellSource]) -> None:
    """Register the cells' sources and labels in this process.

    From then on tracebacks, ``inspect.getsource``, warnings and torch.compile find the source lines
    in ``linecache``, though no such file exists.
    """
    for source in sources:
        lines = source.text.splitlines(keepends=True)
        # None for the time of change: ``linecache.checkcache`` keeps such an entry. It would drop
        # any other, since there is no such file.
        linecache.cache[source.filename] = (len(source.text), None, lines, source.filename)
        _labels[source.filename] = source.label


def name_files(text: str) -> str:
    """Return a text with the labels of cells ("Cell In[3]") in place of their file names."""
    for filename, label in _labels.items():
        text = text.replace(filename, label)
    return text


def name_cells(text: str, labels: Mapping[str, str] | None = None) -> str:
    """Return a formatted traceback with the labels of cells in place of their file names."""
    known = _labels if labels is None else labels
    return _FILE.sub(lambda match: known.get(match[1], match[0]), text)


def main_namespace() -> dict[str, Any]:
    """Return the global variables of this process's ``__main__``."""
    return vars(sys.modules["__main__"])


def fresh_main() -> None:
    """Replace this process's ``__main__`` by an empty module (in a rank, before its first call)."""
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module


def fill_main(objects: Iterable[Any]) -> None:
    """Assign the notebook's classes and functions to their names in this rank's ``__main__``.

    Plain pickle, as in ``torch.save`` and DataLoader workers, looks them up there. A name that has
    a value already keeps it if other code assigned the value. A value that an earlier call of this
    function assigned is replaced.
    """
    namespace = main_namespace()
    filled = namespace.setdefault(_FILLED, {})
    for value in objects:
        name = getattr(value, "__qualname__", None) or value.__name__
        if value.__module__ != "__main__" or not name.isidentifier():
            continue
        if name not in namespace or namespace[name] is filled.get(name):
            namespace[name] = filled[name] = value
