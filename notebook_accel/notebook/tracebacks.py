"""Errors as the cell shows them: what happened in the ranks, not the frames of this package.

The sources of the notebook's cells travel to the ranks for their tracebacks. IPython asks an
exception for ``_render_traceback_`` and shows the lines that it gives in place of a traceback.
``NotebookAccelError`` has the method; exceptions of Python's own are given one.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from notebook_accel.errors import NotebookAccelError, WorkerError
from notebook_accel.launch import run_list
from notebook_accel.launch.payload import CellSource
from notebook_accel.launch.run import Run
from notebook_accel.notebook.used_names import names_of, without_watcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["cell_numbers", "cell_sources", "show_in_short"]

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
    names = list(linecache.cache)
    label: Any = getattr(shell.compile, "format_code_name", None)
    if label is not None:
        labels = {name: label(name) for name in names}
        # ("Cell", "In[3]"), and nothing of what is no cell
        return {name: int(said[1][3:-1]) for name, said in labels.items() if said}
    # IPython 7 has no labels: its history says which cell had which text.
    cells = enumerate(shell.user_ns.get("In", ()))
    history = {text.rstrip(): number for number, text in cells if text.strip()}
    numbers = {name: history.get("".join(linecache.getlines(name)).rstrip()) for name in names}
    return {name: number for name, number in numbers.items() if number is not None}


# What to do where nothing is left of the rank that raised.
_NEXT_TIME = (
    "Launch again with debug=True, and `%accelerate debug` looks into its frames; or with "
    'engine="inline", in one process, where %debug does'
)


@contextmanager
def show_in_short() -> Iterator[None]:
    """Have IPython show an error that passes through here in a few lines.

    The error itself and its traceback stay as they are: ``raise``, ``sys.last_value`` and
    ``%debug`` work on them.
    """
    try:
        yield
    except (KeyboardInterrupt, TimeoutError) as error:
        run = getattr(error, "run", None)
        if run is not None:
            text = str(error) or "the run was interrupted"
            kept = f"the run is kept: {run_list.expression_now(run.id)}"
            first = f"\x1b[0;31m{type(error).__name__}\x1b[0m: {text}; {kept}"
            shown = ["\n".join([first, *_older_runs(run.id)])]
            error._render_traceback_ = lambda: shown  # type: ignore[union-attr]
        _forget_older_traceback()
        raise
    except NotebookAccelError as error:
        shell = get_ipython()
        error.cell_names = {cell.filename: cell.label for cell in cell_sources(shell)}
        if error.run is not None:
            hints = [error.hint] if error.hint else []
            error.hint = "\n".join([*hints, *_older_runs(error.run.id)])
        if shell is not None and isinstance(error, WorkerError):
            _say_at_debug(shell)
        _forget_older_traceback()
        raise
    except Exception:
        _forget_older_traceback()
        raise


def _older_runs(run_id: str) -> Sequence[str]:
    """A line for each name that the cell would have given the run that raised, and did not.

    It still has the run of an earlier launch, whose results the person would take for the new ones.
    """
    shell: Any = get_ipython()
    if shell is None:
        return []
    text = shell.history_manager.input_hist_raw[-1]
    assigned = names_of(shell.transform_cell(without_watcher(text))).assigned
    values = {name: shell.user_ns.get(name) for name in sorted(assigned)}
    this = run_list.expression_now(run_id)
    return [
        f"`{name}` still names run {value.id}, launched earlier. This one: {this}"
        for name, value in values.items()
        if isinstance(value, Run) and value.id != run_id
    ]


def _say_at_debug(shell: Any) -> None:
    """Let ``%debug`` say what to type instead after an error that was raised in a rank: IPython's
    own would stand in this package's frames in the notebook."""
    plain = shell.find_line_magic("debug")
    if plain is None or hasattr(plain, "of_ipython"):
        return

    @wraps(plain)
    def debug(line: str = "", *args: Any, **kwargs: Any) -> None:
        error = getattr(sys, "last_value", None)
        if line or args or not isinstance(error, WorkerError) or _is_raised_here(error):
            plain(line, *args, **kwargs)
            return
        advice = next((line for line in error.hint.split("\n") if "debug" in line), _NEXT_TIME)
        print(f"the error was raised in a rank. {advice}")  # noqa: T201

    debug.of_ipython = plain  # type: ignore[attr-defined]
    shell.register_magic_function(debug, "line_cell", "debug")


def _is_raised_here(error: WorkerError) -> bool:
    """Whether its traceback ends in the person's own code, as that of an inline run."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return not str(frame.f_globals.get("__name__")).startswith("notebook_accel.")


def _forget_older_traceback() -> None:
    # %debug goes where IPython drew a traceback last; an error that draws itself resets nothing.
    formatter = getattr(get_ipython(), "InteractiveTB", None)
    if formatter is not None:
        formatter.tb = None
