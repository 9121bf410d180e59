"""The notebook's cells in a rank: their sources, their names in tracebacks, their ``__main__``."""

from __future__ import annotations

import builtins
import dis
import linecache
import re
import sys
import types
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "CellSource",
    "fill_main",
    "fresh_main",
    "global_names",
    "install_sources",
    "label_of",
    "main_namespace",
    "name_cells",
]


@dataclass(frozen=True)
class CellSource:
    """The text of a cell.

    Attributes:
        filename: what the code objects of the cell name as their file.
        label: what a person calls it: "Cell In[3]".
        text: its source.
    """

    filename: str
    label: str
    text: str


# The name in ``__main__`` under which fill_main notes what it put there.
_FILLED = "__notebook_accel_filled__"

_labels: dict[str, str] = {}
_FILE = re.compile(r'File "([^"\n]+)"(?=, line \d)')


def install_sources(sources: Sequence[CellSource]) -> None:
    """Let tracebacks, ``inspect.getsource``, warnings and torch.compile find the cells."""
    for source in sources:
        lines = source.text.splitlines(keepends=True)
        # None for the time of change: ``linecache.checkcache`` keeps such an entry. It would drop
        # any other, since there is no such file.
        linecache.cache[source.filename] = (
            len(source.text),
            None,
            lines,
            source.filename,
        )
        _labels[source.filename] = source.label


def label_of(filename: str) -> str:
    """Return the label of a cell ("Cell In[3]") for its file name; other names unchanged."""
    return _labels.get(filename, filename)


def name_cells(text: str, labels: Mapping[str, str] | None = None) -> str:
    """Return a formatted traceback with the labels of cells in place of their file names.

    Args:
        text: the traceback.
        labels: by file name; None: of the cells that were installed here.
    """
    known = _labels if labels is None else labels
    return _FILE.sub(lambda match: known.get(match[1], match[0]), text)


def main_namespace() -> dict[str, Any]:
    """The globals of this process's ``__main__``."""
    return vars(sys.modules["__main__"])


def fresh_main() -> None:
    """Put an empty ``__main__`` in place of the process's own."""
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module


def fill_main(objects: Iterable[Any]) -> None:
    """Assign the cells' classes and functions to their names in ``__main__``.

    Plain pickle finds them there: ``torch.save``, and what DataLoader workers send. A name that
    the function uses as a global keeps the value that came with the function; one that an earlier
    call put here, and that nobody has assigned since, gets the new value.
    """
    namespace = main_namespace()
    filled = namespace.setdefault(_FILLED, {})
    for value in objects:
        name = getattr(value, "__qualname__", None) or value.__name__
        if value.__module__ != "__main__" or not name.isidentifier():
            continue
        if name not in namespace or namespace[name] is filled.get(name):
            namespace[name] = filled[name] = value


@lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names that ``code``, nested functions included, may look up as globals."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(_looked_up(code, "LOAD_GLOBAL")).union(*map(global_names, inner))


def _looked_up(code: types.CodeType, *operations: str) -> Iterator[str]:
    wanted = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", *operations)
    return (step.argval for step in dis.get_instructions(code) if step.opname in wanted)
