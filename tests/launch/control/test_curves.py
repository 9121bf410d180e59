"""Curves of bounded size that lose no peak."""

import math
import random
from itertools import pairwise

import pytest

from notebook_accel.launch.control.curves import Curve, LiveCurves


def test_values_without_a_step_are_counted():
    curve = Curve()
    for value in (3.0, math.nan, 1.0):
        curve.add(None, value)
    assert [x for x, _ in curve.points()] == [0, 1, 2]
    assert [y for _, y in curve.points() if math.isfinite(y)] == [3.0, 1.0]


@pytest.mark.parametrize("number", [257, 1000, 12_345])
def test_a_long_curve_keeps_its_extent_and_its_peaks(number):
    random.seed(number)
    curve = Curve()
    values = [random.gauss(0, 1) for _ in range(number)]
    values[number // 3], values[number // 2] = 100.0, -100.0
    for step, value in enumerate(values):
        curve.add(step, value)
    points = curve.points()
    assert len(points) <= 514
    assert (number // 3, 100.0) in points
    assert (number // 2, -100.0) in points
    assert points[0] == (0, values[0])
    assert points[-1] == (number - 1, values[-1])
    assert all(values[int(x)] == y for x, y in points), "every point was logged"
    gaps = [after[0] - before[0] for before, after in pairwise(points)]
    assert max(gaps) <= number / 40, "as fine at the begin as at the end"


def test_a_metric_has_the_curve_of_the_lowest_rank_that_logs_it():
    curves = LiveCurves()
    curves.add(1, 0, {"loss": 2.0, "lr": 0.1})
    curves.add(0, 0, {"loss": 1.0})
    curves.add(1, 1, {"loss": 3.0, "lr": 0.2})
    points = {name: curve.points() for name, curve in curves.by_name().items()}
    assert points == {"loss": [(0, 1.0)], "lr": [(0, 0.1), (1, 0.2)]}
    assert curves.version == 3


def test_a_begin_that_was_logged_more_often_leaves_room_for_the_rest():
    curve = Curve()
    steps = [*range(5_000), *range(5_000, 500_000, 500)]
    for step in steps:
        curve.add(step, 1 / (step + 1))
    xs = [x for x, _ in curve.points()]
    assert (xs[0], xs[-1]) == (0, steps[-1])
    assert max(after - before for before, after in pairwise(xs)) <= 500_000 / 60


def test_steps_that_go_back_find_their_place():
    curve = Curve()
    for step in [*range(1_000), *range(1_000)]:
        curve.add(step, float(step))
    points = curve.points()
    assert points == sorted(points)
    assert len(points) <= 514
    assert (points[0], points[-1]) == ((0, 0), (999, 999))


@pytest.mark.parametrize("number", [100, 5_000])
def test_what_is_not_finite_has_a_place_and_is_counted(number):
    curve = Curve()
    for step in range(number):
        is_bad = step == number // 4 or step > number // 2
        curve.add(step, math.nan if is_bad else 1.0 + step)
    points = curve.points()
    assert points[-1][0] == number - 1
    gaps = [x for x, y in points if not math.isfinite(y)]
    assert gaps[0] == number // 4
    assert number // 2 < gaps[1] <= number // 2 + number / 64 + 1
    assert curve.num_not_finite == number - number // 2
    assert curve.not_finite_since == number // 2 + 1
    curve.add(number, 1.0)
    assert curve.not_finite_since is None
