"""Errors as the cell shows them: what happened in the ranks, not the frames of this package."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from IPython.core.getipython import get_ipython

from notebook_accel.errors import NotebookAccelError
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
        _say_what_is_left(error)
        _forget_older_traceback()
        raise
    except NotebookAccelError as error:
        error.cell_names = {cell.filename: cell.label for cell in cell_sources(get_ipython())}
        _forget_older_traceback()
        raise
    except Exception:
        _forget_older_traceback()
        raise


def _say_what_is_left(error: BaseException) -> None:
    if getattr(error, "run", None) is None:
        return
    text = str(error) or "the run was interrupted"
    kept = "its logs, metrics and results are kept: notebook_accel.runs()[-1]"
    lines = [f"\x1b[0;31m{type(error).__name__}\x1b[0m: {text}; {kept}"]
    # IPython asks an error for this; errors of Python's own have no place for it but here.
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]


def _forget_older_traceback() -> None:
    # An error that draws itself does not reset what IPython drew last, where %debug would go.
    formatter = getattr(get_ipython(), "InteractiveTB", None)
    if formatter is not None:
        formatter.tb = None
