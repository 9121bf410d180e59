"""Stacks as a person reads them: cells by their names, and no frame of the launcher's own.

A rank writes its stacks by ``faulthandler``, which works while native code holds the GIL but knows
only file names, and shows the frames of ``worker/call.py`` that called the function of the user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accel.launch.payload.cells import name_cells

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Frame", "frames_of_function", "readable", "stacks_text"]

# What faulthandler writes of the frame that calls the function, the newest frame first.
_CALLER = re.compile(r'^  File ".*[/\\]launch[/\\]worker[/\\]call\.py", line \d+ in _run$')
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str


def stacks_text(dumps: Sequence[tuple[int, str]], labels: Mapping[str, str]) -> str:
    """The dumps of several ranks as one text.

    Args:
        dumps: number of each rank, and what faulthandler wrote of it.
        labels: what a person calls each cell, by the name of its file.
    """
    return "\n".join(f"rank {rank}\n{readable(text, labels)}" for rank, text in dumps)


def readable(text: str, labels: Mapping[str, str]) -> str:
    """A dump of faulthandler's with cells by their labels, and nothing below the user's function.

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


def frames_of_function(text: str) -> list[Frame]:
    """The frames of the user's function, the newest first; none where no thread is in it.

    Args:
        text: a dump of faulthandler's, of all threads.
    """
    frames: list[Frame] = []
    for line in text.splitlines():
        found = _FRAME.match(line)
        if line == "  ..." and frames:  # it writes the newest hundred
            return frames
        if found is None:  # another thread begins
            frames = []
        elif _CALLER.match(line):
            return frames
        else:
            frames.append(Frame(file=found[1], line=int(found[2]), function=found[3]))
    return []
