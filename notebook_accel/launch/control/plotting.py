"""Turn metrics of a run into curves, and plot them with matplotlib if it is installed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
# Points (step, value) of each rank, of each metric by name.
Curves = dict[str, dict[int, list[Point]]]


def number_steps(metrics: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of rows of ``run.metrics``, in which every row has a step.

    The step of a value that was logged without a step is the number of values of the same name that
    its rank had logged before. Tables and plots both use this function, and so show equal steps.
    """
    counts: dict[tuple[str, int], int] = {}
    rows: list[dict[str, Any]] = []
    for row in metrics:
        key = (row["name"], row["rank"])
        count = counts.get(key, 0)
        counts[key] = count + 1
        rows.append({**row, "step": count if row["step"] is None else row["step"]})
    return rows


def metric_curves(metrics: Iterable[Mapping[str, Any]]) -> Curves:
    """Return the points (step, value) of each rank, by metric name and rank number."""
    curves: Curves = {}
    for row in number_steps(metrics):
        points = curves.setdefault(row["name"], {}).setdefault(row["rank"], [])
        points.append((float(row["step"]), float(row["value"])))
    return {name: dict(sorted(by_rank.items())) for name, by_rank in curves.items()}


def plot_together(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    names: Sequence[str],
    colours: Sequence[str] = (),
    *,
    of: str = "these runs",
    caller: str = "compare()",
) -> list[Axes]:
    """Draw each metric in axes of its own, and return these: a colour a run, or a line a rank."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise ImportError(f"{caller} needs matplotlib: pip install matplotlib") from None
    curves = {label: metric_curves(metrics) for label, metrics in runs.items()}
    known = dict.fromkeys(name for found in curves.values() for name in found)
    shown = chosen(known, names, of=of)
    if not shown:
        return []
    # Two in a row: a page shrinks a wider figure until nobody can read it.
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    size = 4.5 * columns, 3 * rows
    _, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    axes = list(grid.flat)
    if len(axes) > len(shown):
        axes.pop().remove()
    for name, axis in zip(shown, axes, strict=True):
        axis.set_title(name)
        axis.set_xlabel("step")
        for index, (label, found) in enumerate(curves.items()):
            for number, (rank, points) in enumerate(found.get(name, {}).items()):
                colour, text = None, f"rank {rank}"
                if colours:
                    # One entry in the legend for all ranks of a run.
                    colour, text = colours[index % len(colours)], label if number == 0 else ""
                axis.plot(*zip(*points, strict=True), color=colour, label=text or None)
        if colours or len(axis.lines) > 1:
            axis.legend()
    return axes


def chosen(known: Iterable[str], names: Sequence[str], *, of: str) -> list[str]:
    """Return ``names``, or all that are known; ConfigError for one that is not."""
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        logged = ", ".join(map(repr, known)) or "none"
        raise ConfigError(f"no metric is called {unknown[0]!r}; {of} logged {logged}")
    return list(names) or known
