"""Stacks as a person reads them: cells by their names, and no frame of the launcher's own.

A rank writes its stacks by ``faulthandler``, which works while native code holds the GIL but knows
only file names, and shows the frames of ``worker/main.py`` that called the function of the user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accel.launch.payload.cells import name_cells

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Frame", "frames_of_function", "readable", "stacks_text"]

# What faulthandler writes of the frame that calls the function, the newest frame first. In a
# session a second one stands above it.
_CALLER = re.compile(
    r'^  File ".*[/\\](launch[/\\]worker[/\\]main|notebook[/\\]worker[/\\]calls)\.py", '
    r"line \d+ in (_run|__call__)$"
)
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
    """Format a faulthandler dump for a person: the thread of the user's function comes first.

    Cells have their labels, and nothing below the user's function is shown.

    Args:
        text: the dump.
        labels: what a person calls each cell, by the name of its file.
    """
    threads = sorted(_threads(text), key=_nearness)
    shown = ("\n".join(_without_callers(each)) for each in threads)
    return name_cells("\n\n".join(shown) + "\n", labels)


def _threads(text: str) -> list[list[str]]:
    """Split a dump into the lines of each thread; text that is no dump is one thread."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith("  ") and line:
            threads.append([line])
        elif threads and line:
            threads[-1].append(line)
    return threads


def _nearness(lines: Sequence[str]) -> int:
    """Return a sort key: 0 for the thread of the user's function, 1 for the main one, else 2."""
    if any(map(_CALLER.match, lines)):
        return 0
    return 1 if lines[0].startswith("Current thread") else 2


def _without_callers(lines: Sequence[str]) -> list[str]:
    """Return the user's lines of a stack, newest first: those above the launcher's frames."""
    callers = (index for index, line in enumerate(lines) if _CALLER.match(line))
    return list(lines[: next(callers, len(lines))])


def frames_of_function(text: str) -> list[Frame]:
    """Return the frames of the user's function, newest first; none if no thread runs it.

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
