"""Stacks as a person reads them: cells by their names, and no frame of the launcher's own.

A rank writes its stacks by ``faulthandler``, which works while native code holds the GIL but knows
only file names, and shows the frames of ``worker/main.py`` that called the user's function.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from notebook_accel.launch.payload.cells import name_cells

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["readable"]

# What faulthandler writes of the frame that calls the function, the newest frame first.
_CALLER = re.compile(r'^  File ".*[/\\]launch[/\\]worker[/\\]call\.py", line \d+ in _run$')


def readable(text: str, labels: Mapping[str, str]) -> str:
    """Rewrite a dump of faulthandler's: cells by their labels, nothing below the user's function.

    Args:
        text: the dump.
        labels: what a person calls each cell, by the name of its file.
    """
    lines: list[str] = []
    # Frames are indented, the newest first: from the caller to the thread's end all is ours.
    is_ours = False
    for line in text.splitlines():
        is_ours = line.startswith("  ") and (is_ours or bool(_CALLER.match(line)))
        if not is_ours:
            lines.append(line)
    return name_cells("\n".join(lines) + "\n", labels)
