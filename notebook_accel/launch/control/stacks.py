"""Stacks as a person reads them: cells by their names, and no frame of the launcher's own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from notebook_accel.launch.payload.cells import name_cells

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["readable"]

# What faulthandler writes of the frame that calls the function, the newest frame first.
_CALLER = re.compile(r'^  File ".*[/\\]launch[/\\]worker[/\\]main\.py", line \d+ in _work$')


def readable(text: str, labels: Mapping[str, str]) -> str:
    """A dump of faulthandler's with cells' labels, each thread down to the user's function.

    Args:
        text: the dump.
        labels: what a person calls each cell, by the name of its file.
    """
    lines: list[str] = []
    is_below = False
    for line in text.splitlines():
        is_below = line.startswith("  ") and (is_below or bool(_CALLER.match(line)))
        if not is_below:
            lines.append(line)
    return name_cells("\n".join(lines) + "\n", labels)
