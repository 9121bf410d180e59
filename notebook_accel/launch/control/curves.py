"""Metrics of a running run as curves of bounded size, which the live charts draw.

A curve keeps at most some 1,000 points: when there are more, half of them are left out, but no peak
(:func:`thin_out`). So the chart shows the run from its first step on, and a million values need as
much memory as a thousand. All values are on disk (``metrics_file.py``), from which tables and
matplotlib's plots are made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
# Points (step, value) of each rank, of each metric by name.
Curves = dict[str, dict[int, list[Point]]]
# Of a curve that is drawn: the lowest and the highest of so many stretches as a chart has pixels.
MAX_POINTS = 514
# The most curves of a run, of 120 KB each.
_MAX_CURVES = 2_000
# Words in the names of metrics whose best value is the lowest, or the highest.
_LOWER = {"loss", "error", "perplexity", "ppl", "mse", "rmse", "mae", "wer", "cer"}
_HIGHER = {"accuracy", "acc", "f1", "auc", "precision", "recall", "bleu", "reward", "score", "iou"}
# Those in the names of metrics of data that was not trained on.
_HELD_OUT = {"eval", "val", "valid", "validation", "test", "dev"}


@lru_cache(maxsize=_MAX_CURVES)
def mode_of(name: str) -> str | None:
    """Return whether the metric's best value is the lowest or the highest, if its name says it."""
    words = _words(name)
    return "min" if words & _LOWER else "max" if words & _HIGHER else None


def main_metric(names: Iterable[str]) -> str | None:
    """Return the metric by which a training is judged, of those that have a ``mode_of``.

    It is one of held-out data before one of training data, one such as the accuracy before a loss,
    and of several the first.
    """
    order = lambda name: (not _words(name) & _HELD_OUT, mode_of(name) != "max")  # noqa: E731
    return min(filter(mode_of, names), key=order, default=None)


def _words(name: str) -> set[str]:
    return {*re.split(r"[^a-z0-9]+", name.lower())}


# The metric that has the values of a knob begins so.
_KNOB = "knob/"
_MAX_MARKS = 12


def thin_out(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return the points sorted by step; of many only ``limit``, so that no peak or gap is lost.

    The steps are divided into stretches of equal length. Of each the lowest and the highest point
    stay, and the first whose value is not finite; so do the first and the last of all.
    """
    points = sorted(points)
    if len(points) <= limit:
        return points
    of_each = 2 if all(math.isfinite(y) for _, y in points) else 3
    first = points[0][0]
    width = (points[-1][0] - first) / max(1, (limit - 2) // of_each - 1) or 1
    kept = {0, len(points) - 1}
    for _, stretch in groupby(enumerate(points), lambda each: (each[1][0] - first) // width):
        values = [(y, place) for place, (_, y) in stretch]
        finite = [each for each in values if math.isfinite(each[0])]
        if finite:
            kept |= {min(finite)[1], max(finite)[1]}
        if len(finite) < len(values):
            kept.add(next(place for y, place in values if not math.isfinite(y)))
    return [points[place] for place in sorted(kept)]


class Curve:
    """The curve of one metric of one rank, in bounded memory.

    Attributes:
        num_not_finite: how many values are nan or infinite.
        not_finite_since: the step from which on every value is nan or infinite, up to the newest
            value; None if the newest value is finite.
        marks: the newest changes of knobs, as (step, name, value); the step is the curve's last
            one before the change.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self.last = math.nan
        self.num_not_finite = 0
        self.not_finite_since: float | None = None
        self.marks: tuple[tuple[float, str, float], ...] = ()
        self._num = 0
        self._furthest = -math.inf
        self._max_points = max_points
        self._points: list[Point] = []

    def add(self, step: float | None, value: float) -> None:
        """Add a value; if ``step`` is None, its step is the number of values added before it."""
        x = float(self._num if step is None else step)
        self._num += 1
        self._furthest = max(self._furthest, x)
        self.last = value
        if math.isfinite(value):
            self.not_finite_since = None
        else:
            self.num_not_finite += 1
            self.not_finite_since = x if self.not_finite_since is None else self.not_finite_since
        self._points.append((x, value if math.isfinite(value) else math.nan))
        if len(self._points) > 2 * self._max_points:
            self._points = self.points()

    def mark(self, name: str, value: float) -> None:
        """Note that a knob was given a value now."""
        if self._num:
            self.marks = (*self.marks, (self._furthest, name, value))[-_MAX_MARKS:]

    def with_points(self, points: Sequence[Point]) -> Curve:
        """Return this curve with other points to draw: some of its own, or smoothed ones."""
        drawn = copy(self)
        drawn._points = list(points)
        return drawn

    def points(self) -> list[Point]:
        """Return the points (step, value) to draw (:func:`thin_out`).

        A value is nan where a nan or infinite value interrupts the line.
        """
        return thin_out(self._points, self._max_points)


def to_draw(names: Iterable[str]) -> list[str]:
    """Leave out a knob's own values, unless there is no other chart for its marks."""
    names = list(names)
    return _without_knobs(names) or names


def _without_knobs(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(_KNOB)]


class LiveCurves:
    """The curves of all metrics of a run, each of the lowest rank that has logged it.

    The running call (:class:`RankCall`) adds values in one thread while charts read in another.
    """

    def __init__(self, max_points: int = MAX_POINTS, max_curves: float = _MAX_CURVES) -> None:
        self.version = 0
        self._max_points, self._max_curves = max_points, max_curves
        self._curves: dict[str, tuple[int, Curve]] = {}

    def add(self, rank: int, step: int | None, values: Mapping[str, float]) -> None:
        """Add the values of one ``accelerator.log`` call of a rank.

        Values of more metrics than ``max_curves`` are dropped: a run that goes on keeps 2,000.
        """
        self.version += 1
        for name, value in values.items():
            lowest, curve = self._curves.get(name, (math.inf, None))
            if curve is None and len(self._curves) >= self._max_curves:
                continue
            if curve is None or rank < lowest:
                lowest, curve = rank, Curve(self._max_points)
                self._curves[name] = lowest, curve
            if rank == lowest:
                curve.add(step, value)
            if name.startswith(_KNOB):
                for other in _without_knobs(self._curves):
                    self._curves[other][1].mark(name.removeprefix(_KNOB), value)

    def by_name(self) -> dict[str, Curve]:
        """Return the curves, in the order in which their metrics were first logged."""
        return {name: self._curves[name][1] for name in list(self._curves)}


# ---- all values, as tables and matplotlib have them ------------------------------------------


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
