"""Make stack dumps and tracebacks of ranks readable: name cells, leave out or fold frames.

A rank writes its stacks with ``faulthandler``, by a signal also while native code holds the GIL.
The output of ``faulthandler`` has file names in place of cell labels, and includes the frames of
``worker/main.py`` that called the user's function. Of a traceback, the frames of libraries are
folded; the log of the rank has it whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile

from notebook_accel.launch.payload.cells import name_cells
from notebook_accel.system.modules import is_library_file
from notebook_accel.wire import Frame

# What faulthandler writes of the frame that calls the function, the newest frame first. In a
# session a second one stands above it.
_CALLER = re.compile(
    r'^  File ".*[/\\](launch[/\\]worker[/\\]main|notebook[/\\]worker)\.py", '
    r"line \d+ in (_run|__call__)$"
)
# A thread of the launcher's, which waits for the agent.
_WAITS_FOR_AGENT = re.compile(r'^  File ".*[/\\]launch[/\\]worker[/\\]groups\.py", .* in follow$')
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
# A frame with its lines of source, marks below them included; exception groups begin lines by "|".
_TRACED = re.compile(
    r'(?:^[ |]*File "(?P<path>[^"\n]+)", line \d+.*\n(?:^[ |]* {4}(?!File ").*\n)*)'
    r"|(?:^.*\n?)",
    re.MULTILINE,
)
_IN_PACKAGES = re.compile(r"[\\/](?:site|dist)-packages[\\/]([^\\/]+?)(?:\.py)?(?:[\\/]|$)")


def stacks_text(dumps: Sequence[tuple[int, str]], labels: Mapping[str, str]) -> str:
    """Return the stacks of several ranks as one readable text."""
    return "\n".join(f"rank {rank}\n{readable(text, labels)}" for rank, text in dumps)


def readable(text: str, labels: Mapping[str, str]) -> str:
    """Format a faulthandler dump for the user: the thread that runs the user's function first.

    Cells are named by their labels. The launcher's frames that called the function are left out,
    and its own threads.

    Args:
        text: the dump of all threads of one process.
    """
    # A head line for each thread, and its frames.
    found: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith("  ") and line:
            found.append([line])
        elif found and line:
            found[-1].append(line)
    threads = sorted(
        (each for each in found if not any(map(_WAITS_FOR_AGENT.match, each))),
        key=lambda lines: (
            not any(map(_CALLER.match, lines)),
            not lines[0].startswith("Current thread"),
        ),
    )
    # Without the launcher's frames that called the user's function, which stand below it.
    shown = ("\n".join(takewhile(lambda line: not _CALLER.match(line), each)) for each in threads)
    return name_cells("\n\n".join(shown) + "\n", labels)


def crash_text(text: str, labels: Mapping[str, str]) -> str:
    """Return the user's frames of what faulthandler wrote of a crash, newest first; "" if none."""
    frames = frames_of_function(text)
    lines = (f'  File "{each.file}", line {each.line} in {each.function}' for each in frames)
    return name_cells("\n".join(lines), labels)


def frames_of_function(text: str) -> list[Frame]:
    """Return the frames of the user's function and of all that it called, newest first.

    Frames of the launcher, which called the user's function, are left out. [] if no thread runs the
    function.

    Args:
        text: a faulthandler dump of all threads of one process.
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
            frames.append(Frame(found[1], int(found[2]), found[3]))
    return []


def fold_frames(traceback: str) -> str:
    """Return a traceback with one line in place of two or more library frames in a row.

    A traceback without a frame of the user's code is returned unchanged.
    """
    parts = [(match[0], _library(match["path"])) for match in _TRACED.finditer(traceback)]
    is_users = [not library for text, library in parts if re.match(r"[ |]*(File|Cell In)", text)]
    if not any(is_users):
        return traceback
    shown = []
    for is_folded, group in groupby(parts, key=lambda part: bool(part[1])):
        run = list(group)
        if is_folded and len(run) > 1:
            names = list(dict.fromkeys(library for _, library in run))
            *first, last = names
            where = f"{', '.join(first)} and {last}" if first else last
            margin = re.match(r"[ |]*", run[0][0])
            shown.append(f"{margin[0] if margin else ''}... {len(run)} frames of {where} ...\n")
        else:
            shown += [text for text, _ in run]
    return "".join(shown)


def _library(path: str | None) -> str:
    """Return the library that a file belongs to; "" for a file of the user, and for None."""
    if path is None:
        return ""
    found = _IN_PACKAGES.search(path)
    if found:
        return found[1]
    return "Python" if path.startswith("<frozen ") or is_library_file(path) else ""
