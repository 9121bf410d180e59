"""The metrics of a run that goes on, as curves of bounded size: what a live chart draws.

A curve keeps a few hundred stretches of equal length, of each the lowest and the highest value;
when they are too many, every two become one. So no peak is lost, the whole run is there, and a
million values take as much room as a thousand. The metrics themselves are on disk
(``metrics_file.py``).
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_accel.launch.control.plotting import Point

__all__ = ["Curve", "LiveCurves"]

# The most stretches of a curve, an even number; a chart is about as many pixels wide
# (notebook/metric_charts.py).
_MAX_STRETCHES = 256
# With more ranks than this nobody looks at the line of each one: fewer stretches will do.
_MANY_RANKS = 16
_MAX_STRETCHES_OF_MANY = 64
# The most curves of a run: 60 MB in all, at 3 KB each.
_MAX_CURVES = 20_000


class Curve:
    """One metric of one rank.

    Attributes:
        last: the newest value.
    """

    def __init__(self, max_stretches: int = _MAX_STRETCHES) -> None:
        self.last = math.nan
        self._num = 0
        self._max = max_stretches
        # Values in each stretch, and in the one that is not full yet.
        self._size = 1
        self._filled = 0
        # Steps and values of the lowest and of the highest point of each stretch.
        self._low_x, self._low_y = array("d"), array("d")
        self._high_x, self._high_y = array("d"), array("d")
        # The mean step and value of each stretch.
        self._mean_x, self._mean_y = array("d"), array("d")

    def add(self, step: float | None, value: float) -> None:
        """Add a value; without a step, it has its own count as one."""
        x = float(self._num if step is None else step)
        self._num += 1
        self.last = value
        if not math.isfinite(value):
            return
        if self._filled == 0:
            if len(self._low_x) >= self._max:
                self._halve()
            self._low_x.append(x)
            self._low_y.append(value)
            self._high_x.append(x)
            self._high_y.append(value)
            self._mean_x.append(x)
            self._mean_y.append(value)
        elif value < self._low_y[-1]:
            self._low_x[-1], self._low_y[-1] = x, value
        elif value > self._high_y[-1]:
            self._high_x[-1], self._high_y[-1] = x, value
        weight = 1 / (self._filled + 1)
        self._mean_x[-1] += weight * (x - self._mean_x[-1])
        self._mean_y[-1] += weight * (value - self._mean_y[-1])
        self._filled = (self._filled + 1) % self._size

    def _halve(self) -> None:
        """Make one stretch of every two; there is an even number of them, and all are full."""
        self._size *= 2
        for xs, ys, pick in (
            (self._low_x, self._low_y, min),
            (self._high_x, self._high_y, max),
        ):
            points = list(zip(ys, xs, strict=True))
            picked = [pick(pair) for pair in zip(points[::2], points[1::2], strict=True)]
            xs[:] = array("d", (x for _, x in picked))
            ys[:] = array("d", (y for y, _ in picked))
        for means in (self._mean_x, self._mean_y):
            pairs = zip(means[::2], means[1::2], strict=True)
            means[:] = array("d", (sum(pair) / 2 for pair in pairs))

    def points(self) -> list[Point]:
        """The points (step, value) in the order of their steps."""
        # Another thread may be adding: a point that it has half done is left out, and one drawing
        # may have wrong points while it halves. No lock: an interrupt could leave it locked.
        low = zip(self._low_x, self._low_y, strict=False)
        high = zip(self._high_x, self._high_y, strict=False)
        pairs = zip(low, high, strict=False)
        return sorted(
            point for pair in pairs for point in (pair[:1] if pair[0] == pair[1] else pair)
        )

    def means(self) -> list[Point]:
        """The mean step and value of each stretch, in order."""
        return list(zip(self._mean_x, self._mean_y, strict=False))


class LiveCurves:
    """The curves of all metrics and ranks of a run, in the order in which the names came.

    Attributes:
        version: counts the values that were added.
    """

    def __init__(self, world_size: int) -> None:
        self.version = 0
        self._curves: dict[str, dict[int, Curve]] = {}
        self._num = 0
        self._max_stretches = (
            _MAX_STRETCHES if world_size <= _MANY_RANKS else _MAX_STRETCHES_OF_MANY
        )

    def add(self, rank: int, step: int | None, values: Mapping[str, float]) -> None:
        """Add what a rank logged at once; of far too many names the first ones are kept."""
        self.version += 1
        for name, value in values.items():
            by_rank = self._curves.get(name)
            curve = None if by_rank is None else by_rank.get(rank)
            if curve is None:
                if self._num >= _MAX_CURVES:
                    continue
                self._num += 1
                curve = Curve(self._max_stretches)
                # A new mapping: whoever draws in another thread goes through the old one.
                self._curves[name] = {**(by_rank or {}), rank: curve}
            curve.add(step, value)

    @property
    def names(self) -> list[str]:
        """The names of all metrics."""
        return list(self._curves)

    def of(self, name: str) -> dict[int, Curve]:
        """The curve of each rank that logged a metric."""
        return dict(sorted(self._curves[name].items()))
