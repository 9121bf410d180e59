"""The sources of the notebook's cells, which travel to the ranks for their tracebacks."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.payload import CellSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["cell_numbers", "cell_sources"]

# Of a long session only the newest cells travel with each launch.
_MAX_CHARACTERS = 1_000_000


def cell_sources(shell: InteractiveShell | None) -> list[CellSource]:
    """The cells that ``shell`` has run, newest first; none where ``shell`` is None."""
    if shell is None:
        return []
    numbers = cell_numbers(shell)
    newest = sorted(numbers, key=lambda filename: numbers[filename], reverse=True)
    found: list[CellSource] = []
    room = _MAX_CHARACTERS
    for filename in newest:
        text = "".join(linecache.getlines(filename))
        room -= len(text)
        if room < 0:
            break
        found.append(CellSource(filename, f"Cell In[{numbers[filename]}]", text))
    return found


def cell_numbers(shell: InteractiveShell) -> Mapping[str, int]:
    """The number of the cell that each file name stands for."""
    known: Mapping[str, int] | None = getattr(shell.compile, "_filename_map", None)
    if known is not None:
        return known
    # IPython 7 keeps no such map: its history says which cell had which text.
    history = {text.rstrip(): number for number, text in enumerate(shell.user_ns.get("In", ()))}
    cached: Mapping[str, Any] = getattr(linecache, "_ipython_cache", {})
    numbers = {name: history.get("".join(entry[2]).rstrip()) for name, entry in cached.items()}
    return {name: number for name, number in numbers.items() if number is not None}
