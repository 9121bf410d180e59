"""The metrics of a run that goes on, as curves of bounded size: what a live chart draws.

A curve keeps a few hundred stretches, each of equally many steps, and of each the lowest and the
highest value, and whether some value was not finite; when they are too many, every two become one.
So no peak is lost, the whole run is there, and a million values take as much room as a thousand.
The metrics themselves are on disk (``metrics_file.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_accel.launch.control.plotting import Point

__all__ = ["Curve", "LiveCurves", "NotFinite"]

# The most stretches of a curve; a chart is about as many pixels wide (notebook/charts.py).
_MAX_STRETCHES = 256
# The most curves of a run, of 80 KB each.
_MAX_CURVES = 2_000


@dataclass(frozen=True)
class NotFinite:
    """How many values of a curve are nan or infinite.

    Attributes:
        count: of them all.
        since: the step from which on none was finite; None where the newest value is.
    """

    count: int = 0
    since: float | None = None

    def and_then(self, step: float, value: float) -> NotFinite:
        """The same after one more value."""
        if math.isfinite(value):
            return self if self.since is None else NotFinite(self.count)
        return NotFinite(self.count + 1, step if self.since is None else self.since)


class _Stretch(NamedTuple):
    """What is kept of the values of some steps; nan stands for what is not there.

    Attributes:
        low_x, low_y: the lowest point.
        high_x, high_y: the highest point.
        has_value: whether some value is finite.
        gap_x: the first step with a value that is not finite.
    """

    low_x: float
    low_y: float
    high_x: float
    high_y: float
    has_value: bool
    gap_x: float

    @classmethod
    def of(cls, x: float, y: float) -> _Stretch:
        """That of one value."""
        if math.isfinite(y):
            return cls(x, y, x, y, True, math.nan)
        return _NOTHING._replace(gap_x=x)

    def joined(self, other: _Stretch) -> _Stretch:
        """That of the values of both."""
        gap_x = other.gap_x if math.isnan(self.gap_x) else self.gap_x
        if not self.has_value or not other.has_value:
            return (self if self.has_value else other)._replace(gap_x=gap_x)
        low = self if self.low_y <= other.low_y else other
        high = self if self.high_y >= other.high_y else other
        return _Stretch(low.low_x, low.low_y, high.high_x, high.high_y, True, gap_x)

    def points(self) -> list[Point]:
        """Its points, and (step, nan) where the line has a gap; in the order of their steps."""
        points = {(self.low_x, self.low_y), (self.high_x, self.high_y)} if self.has_value else set()
        if not math.isnan(self.gap_x):
            points.add((self.gap_x, math.nan))
        return sorted(points)


_NOTHING = _Stretch(math.nan, math.nan, math.nan, math.nan, False, math.nan)


class Curve:
    """One metric of one rank.

    Attributes:
        last: the newest value.
        not_finite: how many values are nan or infinite, and since when.
    """

    def __init__(self, max_stretches: int = _MAX_STRETCHES) -> None:
        self.last = math.nan
        self.not_finite = NotFinite()
        self._num = 0
        self._max = max_stretches
        # Steps of each stretch; by steps and not by values, as a chart's width is.
        self._width = 1
        # By their places, counted in stretches from step 0 on: steps may go back.
        self._stretches: dict[float, _Stretch] = {}
        # Those of the lowest and of the highest step, which stay whatever is left out.
        self._ends: tuple[Point, Point] | None = None

    def add(self, step: float | None, value: float) -> None:
        """Add a value; without a step, it has its own count as one."""
        x = float(self._num if step is None else step)
        self._num += 1
        self.last = value
        self.not_finite = self.not_finite.and_then(x, value)
        first, last = self._ends or ((x, value), (x, value))
        self._ends = (
            (x, value) if x < first[0] else first,
            (x, value) if x >= last[0] else last,
        )
        number, new = x // self._width, _Stretch.of(x, value)
        before = self._stretches.get(number)
        self._stretches[number] = before.joined(new) if before else new
        while len(self._stretches) > self._max:
            self._width *= 2
            joined: dict[float, _Stretch] = {}
            for number, stretch in sorted(self._stretches.items()):
                before = joined.get(number // 2)
                joined[number // 2] = before.joined(stretch) if before else stretch
            self._stretches = joined

    def points(self) -> list[Point]:
        """The points (step, value) in the order of their steps, the first and the last among them.

        The value is nan where the line has a gap.
        """
        stretches = sorted(self._stretches.items())
        points = [point for _, stretch in stretches for point in stretch.points()]
        if self._ends is None or not points:
            return []
        first, last = self._ends
        before = [first] if first[0] < points[0][0] else []
        after = [last] if last[0] > points[-1][0] else []
        return before + points + after


class LiveCurves:
    """The curves of all metrics and ranks of a run, in the order in which the names came.

    Attributes:
        version: counts the values that were added.
    """

    def __init__(self) -> None:
        self.version = 0
        self._curves: dict[str, dict[int, Curve]] = {}
        self._num = 0

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
                curve = Curve()
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
