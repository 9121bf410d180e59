"""Metrics of several runs, drawn together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from notebook_accel.errors import ConfigError
from notebook_accel.launch.control.plotting import plot_together
from notebook_accel.launch.run import Run
from notebook_accel.notebook.run_table import RunTable
from notebook_accel.text_values import shown

__all__ = ["compare"]


def compare(
    *runs: Run | Sequence[Run] | Mapping[str, Run], names: Sequence[str] = ()
) -> RunTable[Any]:
    """Draw the metrics of runs together with matplotlib: axes for each metric, a colour per run.

    Runs go by their names (``notebook_launcher(..., name="lr 0.1")``); those of equal names have
    their ids beside them.

    Args:
        runs: which to compare, also those of ``runs(everywhere=True)``: one after the other, as a
            list, or as a mapping whose keys are the names that they go by.
        names: which metrics, in this order; all, where none is named.

    Returns:
        The axes, in the order of the names. A notebook shows the list as a table of the runs.

    Raises:
        ConfigError: no run was given, or what is no run, or ``names`` is a text, or no run has a
            metric of that name.
        FileNotFoundError: a run was deleted from disk.
        ImportError: matplotlib is not installed.
    """
    labelled = _labelled(runs)
    if isinstance(names, str):
        raise ConfigError(f"names={shown(names)}: expected a list, such as names=[{shown(names)}]")
    axes = plot_together({label: run.metrics for label, run in labelled}, names)
    return RunTable(axes, labelled, names or None)


def _labelled(runs: Sequence[Any]) -> list[tuple[str, Run]]:
    """The runs, each with what it is called.

    Raises:
        ConfigError: there is none, or what is no run.
    """
    given = runs[0] if len(runs) == 1 and isinstance(runs[0], (list, tuple, Mapping)) else runs
    found = [*given.values()] if isinstance(given, Mapping) else [*given]
    wrong = [run for run in found if not isinstance(run, Run)]
    if wrong or not found:
        what = shown(wrong[0]) if wrong else "nothing"
        raise ConfigError(
            f"compare() got {what}: expected runs, as compare(run1, run2), "
            'compare(notebook_accel.runs()[-3:]) or compare({"lr 0.1": run1, "lr 0.2": run2})'
        )
    if isinstance(given, Mapping):
        return [(str(label), run) for label, run in given.items()]
    all_names = [run.name for run in found]
    return [
        (run.name if all_names.count(run.name) == 1 else f"{run.name} ({run.id})", run)
        for run in found
    ]
