"""Curves of bounded size that lose no peak."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from notebook_accel.launch.control.curves import Curve, LiveCurves


def test_a_short_curve_is_whole() -> None:
    curve = Curve()
    for step in range(10):
        curve.add(step * 5, step * step)
    assert curve.points() == [(step * 5, step * step) for step in range(10)]
    assert curve.last == 81


def test_values_without_a_step_are_counted() -> None:
    curve = Curve()
    for value in (3.0, math.nan, 1.0):
        curve.add(None, value)
    assert curve.points() == [(0, 3.0), (2, 1.0)]


@pytest.mark.parametrize("number", [257, 1000, 12_345])
def test_a_long_curve_keeps_its_extent_and_its_peaks(number: int) -> None:
    random.seed(number)
    curve = Curve()
    values = [random.gauss(0, 1) for _ in range(number)]
    values[number // 3], values[number // 2] = 100.0, -100.0
    for step, value in enumerate(values):
        curve.add(step, value)
    points = curve.points()
    assert len(points) <= 512
    assert (number // 3, 100.0) in points
    assert (number // 2, -100.0) in points
    assert points[0][0] <= number / 64
    assert points[-1][0] >= number * 63 / 64
    assert all(values[int(x)] == y for x, y in points), "every point was logged"
    gaps = [after[0] - before[0] for before, after in pairwise(points)]
    assert max(gaps) <= number / 40, "as fine at the begin as at the end"


def test_curves_by_name_and_rank() -> None:
    curves = LiveCurves(2)
    curves.add(1, 0, {"loss": 2.0, "lr": 0.1})
    curves.add(0, 0, {"loss": 1.0})
    assert curves.names == ["loss", "lr"]
    assert {rank: curve.last for rank, curve in curves.of("loss").items()} == {0: 1.0, 1: 2.0}
    assert curves.version == 2
