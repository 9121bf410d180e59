"""Errors as the cell shows them: what happened in the ranks, not the frames of this package.

IPython asks an exception for ``_render_traceback_`` and shows the lines that it gives in place of
a traceback. ``NotebookAccelError`` has the method; exceptions of Python's own are given one.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from IPython.core.getipython import get_ipython

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch import run_list
from notebook_accel.notebook.sources import cell_sources

if TYPE_CHECKING:
    from collections.abc import Iterator

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
            # A cell that assigns the handle has not come to that: the name has an older run.
            kept = f"the run is kept: {run_list.expression(run.id)}"
            lines = [f"\x1b[0;31m{type(error).__name__}\x1b[0m: {text}; {kept}"]
            error._render_traceback_ = lambda: lines  # type: ignore[union-attr]
        _forget_older_traceback()
        raise
    except NotebookAccelError as error:
        error.cell_names = {cell.filename: cell.label for cell in cell_sources(get_ipython())}
        _forget_older_traceback()
        raise
    except Exception:
        _forget_older_traceback()
        raise


def _forget_older_traceback() -> None:
    # %debug goes where IPython drew a traceback last; an error that draws itself resets nothing.
    formatter = getattr(get_ipython(), "InteractiveTB", None)
    if formatter is not None:
        formatter.tb = None
