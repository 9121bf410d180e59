"""``runs``, ``last_run`` and ``find_run`` as a person calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch import run_list
from notebook_accel.notebook.run_table import RunTable
from notebook_accel.notebook.views import choose_view

if TYPE_CHECKING:
    from notebook_accel.launch.run import Run
    from notebook_accel.launch.view import View

__all__ = ["find_run", "last_run", "runs"]


def find_run(run_id: str) -> Run:
    """The run of that id: one of this process, or one that another left on disk.

    Args:
        run_id: as ``run.id``, the name of the run's folder, says it.

    Raises:
        NotebookAccelError: there is none, or none any more.
        LaunchError: it is not of this process, and this user has no folder for runs.
    """
    return run_list.find_run(run_id, view=_view_of_past)


def last_run() -> Run:
    """The run that this process launched last, also where it failed or was interrupted.

    Such a launch returns no handle: in ``run = notebook_launcher(...)``, ``run`` keeps its value.

    Raises:
        NotebookAccelError: it has launched none.
    """
    here = runs()
    if not here:
        raise NotebookAccelError(
            "this process has launched no run yet; runs(everywhere=True) lists those of earlier "
            "ones, and find_run(id) opens one"
        )
    return here[-1]


def runs(*, everywhere: bool = False) -> RunTable[Run]:
    """The runs of this process, newest last; failed and interrupted ones too.

    A notebook shows the list as a table.

    A run whose handle nobody holds any more has logs, metrics and state, but no results. Of
    launches that raised, and so gave no handle, the newest few have theirs.

    Args:
        everywhere: also those on disk that other processes and earlier kernels left, by time.

    Raises:
        LaunchError: ``everywhere``, and this user has no folder for runs.
    """
    found = run_list.runs(everywhere=everywhere, view=_view_of_past)
    return RunTable(found, [(run.name, run) for run in found])


def _view_of_past() -> View:
    """The view of a run that another process launched: nothing of it moves, so no live panel."""
    return choose_view("text")
