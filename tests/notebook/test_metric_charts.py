"""The live charts: which lines, how much of them, and what they say in words."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import pytest

from notebook_accel.launch.control.curves import LiveCurves
from notebook_accel.notebook.clicks import ClicksAfterTheCell
from notebook_accel.notebook.markup import message_bytes
from notebook_accel.notebook.metric_charts import Chart, Look, groups_of, render_charts
from notebook_accel.notebook.metrics_view import MetricsView
from notebook_accel.notebook.panel_widgets import PanelWidgets
from tests.notebook.test_markup import HOSTILE, Tags

if TYPE_CHECKING:
    from collections.abc import Callable


def chart(num_ranks: int = 2, *, name: str = "loss", steps: int = 300) -> Chart:
    points = {
        rank: [(float(step), math.exp(-step / 50) + rank) for step in range(steps)]
        for rank in range(num_ranks)
    }
    last = {rank: found[-1][1] for rank, found in points.items()}
    return Chart(name=name, points=points, means=points, last=last)


def heights(markup: str) -> list[list[float]]:
    """The heights of the points of each line, from the top."""
    lines = re.findall(r" d='([^']*)'", markup)
    return [
        [float(pair.split(",")[1]) for pair in line.replace("M", " ").split()] for line in lines
    ]


def test_a_line_a_rank_with_values_to_hover_over() -> None:
    page = Tags(render_charts([chart()], Look()))
    assert page.tags.count("path") == 2
    assert "loss" in page.text
    assert "step 299" in page.text
    assert re.search(r"step \d+: rank 0 0\.\d+, rank 1 1\.\d+", page.text)
    assert ("aria-label", "from 0.002529 to 2") in page.attributes


def test_the_mean_is_one_line() -> None:
    page = Tags(render_charts([chart()], Look(is_mean=True)))
    assert page.tags.count("path") == 1
    assert "mean 1.36" in page.text
    # Of many ranks nobody could tell the lines apart.
    assert Tags(render_charts([chart(64)], Look())).tags.count("path") == 1


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
    none = Chart(name="bad", points={0: [(3.0, math.nan)]}, means={}, last={0: math.nan})
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


def live(steps: int, **values: Callable[[int], float]) -> LiveCurves:
    curves = LiveCurves(world_size=1)
    for step in range(steps):
        curves.add(0, step, {name: value(step) for name, value in values.items()})
    return curves


def drawn(curves: LiveCurves, *, is_log: bool = False) -> str:
    view = MetricsView(ClicksAfterTheCell(None), PanelWidgets())
    view._scale.value = is_log
    view.draw(curves, now=0.0)
    return str(view._charts.value)


@pytest.mark.parametrize("steps", [221, 1_250, 20_000])
def test_metrics_of_one_call_cover_one_range(steps: int) -> None:
    markup = drawn(live(steps, loss=lambda s: 1 / (s + 1) + s % 7, epoch=lambda s: s * 4 // steps))
    lines = re.findall(r" d='M([^']*)'", markup)
    ends = [[pair.split(",")[0] for pair in (line.split()[0], line.split()[-1])] for line in lines]
    assert ends == [["0", "240"]] * 2
    assert (
        re.findall(r"<div class='na-chart-steps'><span>0</span>.*?step ([\d,]*)<", markup)
        == [f"{steps - 1:,}"] * 2
    )


@pytest.mark.parametrize("steps", [100, 5_000])
def test_what_is_not_finite_is_said_and_leaves_a_gap(steps: int) -> None:
    curves = live(
        steps,
        loss=lambda s: math.nan if s > 40 else 1 / (s + 1),
        single=lambda s: math.inf if s == steps // 2 else 1.0 + s,
        never=lambda s: math.nan,
    )
    markup, drawn_with_log = drawn(curves), drawn(curves, is_log=True)
    page = Tags(markup)
    assert page.tags.count("svg") == 3
    assert page.text.count(f"step {steps - 1:,}") >= 3
    assert "not finite since step 41" in page.text
    assert "1 value is not finite" in page.text
    assert "not finite since step 0" in page.text
    assert markup.count("na-not-finite") == 3
    for found in (markup, drawn_with_log):
        falling, single = re.findall(r" d='([^']*)'", found)
        assert falling.count("M") == 1
        before, after = single.removeprefix("M").split("M")
        # Wide enough to be seen, however many values there are.
        assert int(after.split(",")[0]) - int(before.split()[-1].split(",")[0]) >= 4


def test_the_note_names_the_ranks_that_differ() -> None:
    curves = LiveCurves(world_size=2)
    for step in range(10):
        curves.add(0, step, {"loss": 1.0})
        curves.add(1, step, {"loss": math.nan if step > 4 else 2.0})
    assert "rank 1: not finite since step 5" in drawn(curves)


def test_the_mean_has_a_gap_where_no_rank_is_finite() -> None:
    points = {rank: [(float(s), math.nan if s == 41 else 1.0) for s in range(300)] for rank in "ab"}
    by_rank = dict(enumerate(points.values()))
    mean = Chart(name="x", points=by_rank, means=by_rank, last={0: 1.0, 1: 1.0})
    (line,) = re.findall(r" d='([^']*)'", render_charts([mean], Look(is_mean=True)))
    assert line.count("M") == 2
    (smooth,) = heights(render_charts([mean], Look(is_mean=True, smoothing=0.9)))
    assert set(smooth) == {32}


def test_labels_of_large_numbers_are_distinct() -> None:
    markup = drawn(live(10, loss=lambda s: 3e9 + 1e4 * s))
    assert re.findall(r"na-tick-\w+'>([^<]*)<", markup) == ["+90,000", "3e9"]


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
