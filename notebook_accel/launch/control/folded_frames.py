"""Folds the frames of libraries in a formatted traceback, which the log of the rank has whole."""

from __future__ import annotations

import re
from itertools import groupby

from notebook_accel.launch.template.prepared_libraries import is_library_file

# A frame with its lines of source, marks below them included; exception groups begin lines by "|".
_FRAME = re.compile(
    r'(?:^[ |]*File "(?P<path>[^"\n]+)", line \d+.*\n(?:^[ |]* {4}(?!File ").*\n)*)'
    r"|(?:^.*\n?)",
    re.MULTILINE,
)
_IN_PACKAGES = re.compile(r"[\\/](?:site|dist)-packages[\\/]([^\\/]+?)(?:\.py)?(?:[\\/]|$)")


def fold_frames(traceback: str) -> str:
    """Return a traceback with one line in place of two or more library frames in a row.

    A traceback without a frame of the user's code is returned unchanged.
    """
    parts = [(match[0], _library(match["path"])) for match in _FRAME.finditer(traceback)]
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
