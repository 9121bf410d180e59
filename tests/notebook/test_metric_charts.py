"""The live charts: which lines, how much of them, and what they say in words."""

from __future__ import annotations

import math
import re

import pytest

from notebook_accel.launch.control.curves import LiveCurves
from notebook_accel.notebook.clicks import ClicksAfterTheCell
from notebook_accel.notebook.markup import message_bytes
from notebook_accel.notebook.metric_charts import Chart, Look, groups_of, render_charts
from notebook_accel.notebook.metrics_view import MetricsView
from notebook_accel.notebook.panel_widgets import PanelWidgets
from tests.notebook.test_markup import HOSTILE, Tags


def chart(num_ranks: int = 2, *, name: str = "loss", steps: int = 300) -> Chart:
    points = {
        rank: [(float(step), math.exp(-step / 50) + rank) for step in range(steps)]
        for rank in range(num_ranks)
    }
    last = {rank: found[-1][1] for rank, found in points.items()}
    return Chart(name=name, points=points, means=points, last=last)


def heights(markup: str) -> list[list[float]]:
    """The heights of the points of each line, from the top."""
    lines = re.findall(r"points='([^']*)'", markup)
    return [[float(pair.split(",")[1]) for pair in line.split()] for line in lines]


def test_a_line_a_rank_with_values_to_hover_over() -> None:
    page = Tags(render_charts([chart()], Look()))
    assert page.tags.count("polyline") == 2
    assert "loss" in page.text
    assert "step 299" in page.text
    assert re.search(r"step \d+: rank 0 0\.\d+, rank 1 1\.\d+", page.text)
    assert ("aria-label", "from 0.002529 to 2") in page.attributes


def test_the_mean_is_one_line() -> None:
    page = Tags(render_charts([chart()], Look(is_mean=True)))
    assert page.tags.count("polyline") == 1
    assert "mean 1.36" in page.text
    # Of many ranks nobody could tell the lines apart.
    assert Tags(render_charts([chart(64)], Look())).tags.count("polyline") == 1


def test_a_logarithmic_scale_is_straight_for_an_exponential_and_left_out_at_zero() -> None:
    (line,) = heights(render_charts([chart(1)], Look(is_log=True)))
    middle = line[len(line) // 2]
    assert middle == pytest.approx((line[0] + line[-1]) / 2, abs=2)
    below = Chart(name="x", points={0: [(0, -1.0), (1, 1.0)]}, means={}, last={0: 1.0})
    assert heights(render_charts([below], Look(is_log=True))) == heights(
        render_charts([below], Look())
    )
    # It is said, as well: nothing would change at the click otherwise.
    assert "x1linear" in Tags(render_charts([below], Look(is_log=True))).text
    assert "linear" not in Tags(render_charts([chart(1)], Look(is_log=True))).text
    assert "linear" not in Tags(render_charts([below], Look())).text


@pytest.mark.parametrize("most", [1.7e308, 1e-320])
def test_the_largest_and_the_smallest_numbers_are_drawn(most: float) -> None:
    points = [(0.0, -most), (1.0, 0.0), (2.0, most)]
    by_rank = {0: points, 1: points}
    odd = Chart(name="x", points=by_rank, means=by_rank, last={0: most, 1: most})
    for look in (Look(), Look(is_mean=True)):
        markup = render_charts([odd], look)
        assert all(line == [60, 32, 4] for line in heights(markup))
        assert not re.search("\\b(nan|inf)\\b", markup)


def test_a_value_that_stays_is_a_line_in_the_middle_with_one_label() -> None:
    flat = Chart(name="lr", points={0: [(0, 0.1), (9, 0.1)]}, means={}, last={0: 0.1})
    for look in (Look(), Look(is_log=True)):
        markup = render_charts([flat], look)
        assert heights(markup) == [[32, 32]]
        assert re.findall("na-tick-([a-z]+)", markup) == ["middle"]


def test_smoothing_calms_a_line() -> None:
    points = [(float(step), float(step % 2)) for step in range(100)]
    noisy = Chart(name="x", points={0: points}, means={0: points}, last={0: 1.0})
    page = Tags(render_charts([noisy], Look(smoothing=0.97)))
    values = [float(value) for value in re.findall(r"rank 0 (0\.\d{1,4}|1)", page.text)]
    assert all(0.4 < value < 0.6 for value in values[2:])


def test_the_last_page_has_as_many_places_as_the_others() -> None:
    markup = render_charts([chart(), chart()], Look(), num_places=6)
    assert markup.count("class='na-chart'") == 6
    assert "--columns:3" in markup


def test_a_single_value_and_one_that_is_no_number() -> None:
    one = Chart(name="best", points={0: [(3.0, 0.5)]}, means={}, last={0: 0.5})
    none = Chart(name="bad", points={0: []}, means={}, last={0: math.nan})
    page = Tags(render_charts([one, none], Look()))
    assert "best0.5" in page.text
    assert "badnan" in page.text
    assert "svg" not in page.tags


@pytest.mark.parametrize(("num_charts", "num_ranks"), [(1, 1), (6, 1), (6, 8), (6, 128), (1, 8)])
def test_a_page_is_small(num_charts: int, num_ranks: int) -> None:
    shown = [chart(num_ranks, name=f"{HOSTILE}{n}") for n in range(num_charts)]
    for look in (Look(), Look(is_mean=True)):
        markup = render_charts(shown, look)
        assert message_bytes(markup) < 24_000
        assert "script" not in Tags(markup).tags


def test_groups_by_prefix() -> None:
    names = ["loss", "train/loss", "train/lr", "eval/loss", "/odd"]
    assert groups_of(names) == {
        "": names,
        "train": ["train/loss", "train/lr"],
        "eval": ["eval/loss"],
    }


def test_a_new_metric_leaves_the_page_that_somebody_reads() -> None:
    curves = LiveCurves(world_size=1)
    curves.add(0, 0, {f"eval/{number}": 1.0 for number in range(7)} | {"loss": 1.0})
    view = MetricsView(ClicksAfterTheCell(None), PanelWidgets())
    view.draw(curves, now=0.0)
    view._group.value = "eval"
    view._after.click()
    view.draw(curves, now=10.0)
    assert view._title.value == "metrics 7-7 of 7"
    assert view._charts.value.count("class='na-chart'") == 6
    curves.add(0, 1, {"train/accuracy": 1.0})
    view.draw(curves, now=20.0)
    assert (view._group.value, view._title.value) == ("eval", "metrics 7-7 of 7")
    assert len(view._group.options) == 3
    view._group.value = ""
    view.draw(curves, now=30.0)
    assert view._title.value == "metrics 1-6 of 9"
    # A group is named as metrics are, however long its name is.
    curves.add(0, 2, {"\x1b[2J" + "long" * 1000 + "/loss": 1.0})
    view.draw(curves, now=40.0)
    label = view._group.options[-1][0]
    assert (label[:8], label[-6:], len(label)) == ("longlong", "…/ (1)", 45)
