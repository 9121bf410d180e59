"""Errors as the cell shows them: what happened in the ranks, not the frames of this package.

IPython asks an exception for ``_render_traceback_`` and shows the lines that it gives in place of
a traceback. ``NotebookAccelError`` has the method; exceptions of Python's own are given one.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch import run_list
from notebook_accel.launch.run import Run
from notebook_accel.notebook.sources import cell_sources
from notebook_accel.notebook.used_names import names_of, without_watcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["show_in_short"]


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
        error.cell_names = {cell.filename: cell.label for cell in cell_sources(get_ipython())}
        if error.run is not None:
            hints = [error.hint] if error.hint else []
            error.hint = "\n".join([*hints, *_older_runs(error.run.id)])
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


def _forget_older_traceback() -> None:
    # %debug goes where IPython drew a traceback last; an error that draws itself resets nothing.
    formatter = getattr(get_ipython(), "InteractiveTB", None)
    if formatter is not None:
        formatter.tb = None
