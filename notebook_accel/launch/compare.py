"""Metrics of several runs, drawn together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.launch.control.plotting import plot_together
from notebook_accel.launch.run import Run
from notebook_accel.text_values import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["compare"]


def compare(*runs: Run, names: Sequence[str] = ()) -> Any:
    """Draw the metrics of runs together with matplotlib: axes for each metric, a colour per run.

    Runs go by their names (``notebook_launcher(..., name="lr 0.1")``); those of equal names have
    their ids beside them.

    Args:
        runs: which to compare, also those of ``runs(everywhere=True)``.
        names: which metrics, in this order; all, where none is named.

    Returns:
        The axes, in the order of the names.

    Raises:
        ConfigError: no run was given, or what is no run, or ``names`` is a text, or no run has a
            metric of that name.
        FileNotFoundError: a run was deleted from disk.
        ImportError: matplotlib is not installed.
    """
    wrong = [run for run in runs if not isinstance(run, Run)]
    if wrong or not runs:
        given = shown(wrong[0]) if wrong else "nothing"
        raise ConfigError(
            f"compare() got {given}: expected runs, as compare(run1, run2) or "
            "compare(*notebook_accel.runs()[-3:])"
        )
    if isinstance(names, str):
        raise ConfigError(f"names={shown(names)}: expected a list, such as names=[{shown(names)}]")
    all_names = [run.name for run in runs]
    labels = [
        run.name if all_names.count(run.name) == 1 else f"{run.name} ({run.id})" for run in runs
    ]
    return plot_together(
        {label: run.metrics for label, run in zip(labels, runs, strict=True)}, names
    )
