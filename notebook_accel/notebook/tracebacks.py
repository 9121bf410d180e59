"""Errors as a cell shows them: what happened in the ranks, without the frames of this package.

The sources of the notebook's cells are sent to the ranks with each launch, so that tracebacks can
quote them. IPython asks an exception for ``_render_traceback_`` and shows the lines that it returns
in place of a traceback. ``NotebookAccelError`` has that method. A ``KeyboardInterrupt`` or
``TimeoutError`` of a run is given that method here.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch import run_list
from notebook_accel.launch.payload.cells import CellSource

# Folders and files between a cell and what raised: this package, and what calls it for a magic.
_INNER = {"notebook_accel", "IPython", "decorator.py", "contextlib.py"}
# Of a long session only the newest cells travel with each launch.
_MAX_CHARACTERS = 1_000_000


def cell_sources(shell: InteractiveShell | None) -> list[CellSource]:
    """Return cells, newest first, a million characters in all; [] for no shell."""
    if shell is None:
        return []
    # The numbers of cells by the file names of their code.
    names = list(linecache.cache)
    label: Any = getattr(shell.compile, "format_code_name", None)
    if label is not None:
        labels = {name: label(name) for name in names}
        # ("Cell", "In[3]"), and nothing of what is no cell
        numbers = {name: int(said[1][3:-1]) for name, said in labels.items() if said}
    else:  # IPython 7 has no labels: its history says which cell had which text.
        cells = enumerate(shell.user_ns.get("In", ()))
        history = {text.rstrip(): number for number, text in cells if text.strip()}
        texts = {name: "".join(linecache.getlines(name)).rstrip() for name in names}
        numbers = {name: history[text] for name, text in texts.items() if text in history}
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


@contextmanager
def show_in_short() -> Iterator[None]:
    """Have IPython show errors of this package and interrupts or timeouts of a run in a few lines.

    The error is raised with its full traceback, for ``sys.last_value`` and ``%debug``.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        run = getattr(error, "run", None)
        if isinstance(error, NotebookAccelError):
            error.cell_names = {cell.filename: cell.label for cell in cell_sources(get_ipython())}
        elif isinstance(error, (KeyboardInterrupt, TimeoutError)) and run is not None:
            text = str(error) or "the run was interrupted"
            # Where training is kept, the summary or the error says the same of that.
            kept = f"; the run is kept: {run_list.expression_now(run.id)}"
            _show_as(error, text if run.state.has_rescued else text + kept)
        elif isinstance(error, KeyboardInterrupt):
            _show_as(error, "interrupted before a run began")
        _lead_debugger(error)
        raise


def _show_as(error: BaseException, text: str) -> None:
    first = f"\x1b[0;31m{type(error).__name__}\x1b[0m: {text}"
    error._render_traceback_ = lambda: [first]  # type: ignore[attr-defined]


def _lead_debugger(error: BaseException) -> None:
    """Have ``%debug`` open the user's frame that called us, or what an inline run raised."""
    formatter = getattr(get_ipython(), "InteractiveTB", None)
    if formatter is None:
        return
    formatter.tb = None
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    frame: FrameType | None = innermost if _is_inner(innermost) else None
    while frame is not None and _is_inner(frame):
        frame = frame.f_back
    while frame is not None:
        formatter.tb = TracebackType(formatter.tb, frame, frame.f_lasti, frame.f_lineno)
        # %debug skips the outermost, which is IPython's own.
        frame = None if _is_inner(frame) else frame.f_back


def _is_inner(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return not _INNER.isdisjoint(path.parts)
