"""Charts, live and saved: which lines, how much of them, and what they say in words."""

import base64
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest

from notebook_accel.launch.control.curves import Curve, LiveCurves
from notebook_accel.notebook.comparison import Charts, called
from notebook_accel.notebook.live_panel import PanelWidgets
from notebook_accel.notebook.metrics_view import MetricsView
from notebook_accel.notebook.runs import RunTable
from notebook_accel.render.charts import COLOURS, chart, draw_metrics, smoothed
from notebook_accel.render.markup import message_bytes
from tests.notebook.states import after, logged, running, with_failed
from tests.notebook.widgets import field
from tests.render.test_markup import HOSTILE, Tags

# ---- of a saved notebook


def image_of(markup):
    """The images inside of both ``<img>``: that of the labels, and that of the curves."""
    both = ET.Element("both")
    for name, source in Tags(markup).attributes:
        if name == "src":
            kind, data = (source or "").split(",")
            assert kind == "data:image/svg+xml;base64"
            both.append(ET.fromstring(base64.b64decode(data)))
    return both


def tags(image, name):
    return list(image.iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def labels(image):
    return [text.text for text in tags(image, "text")]


def test_a_chart_is_an_image_with_labels():
    curve = [(float(step), 1.0 / (step + 1)) for step in range(50)]
    markup = chart({"": curve}, alt="loss: 1 → 0.02")
    assert Tags(markup).tags == ["div", "img", "img", "div"] + ["span"] * 20
    alts = [value for name, value in Tags(markup).attributes if name == "alt"]
    assert alts == ["", "loss: 1 → 0.02"], "the labels say nothing to those who cannot see them"
    image = image_of(markup)
    assert len(tags(image, "path")) == 1
    assert labels(image) == ["1", "0.02", "0", "step 49"]
    # Below the pointer, which what is inside of an image does not hear.
    titles = [value for name, value in Tags(markup).attributes if name == "title"]
    assert len(titles) == 20
    assert titles[0] == "step 1: 0.5"


def test_a_saved_chart_keeps_the_marks_of_knobs():
    curve = [(float(step), 1.0 / (step + 1)) for step in range(51)]
    marks = [(10.0, "lr", 0.01), (60.0, "lr", 0.1)]  # the second one is in no step that is drawn
    markup = chart({"": curve}, alt="loss", marks=marks)
    upright = [line.get("x1") for line in tags(image_of(markup), "line") if line.get("x1")]
    assert upright == ["20.0%"]
    titles = [value for name, value in Tags(markup).attributes if name == "title"]
    assert [title for title in titles if "lr" in title] == ["step 10: lr = 0.01"]


def test_a_line_has_a_gap_where_a_value_is_not_finite():
    points = [(float(x), float(x)) for x in range(10)]
    points[4] = (4.0, math.nan)
    points[8] = (8.0, math.inf)
    image = image_of(chart({"": points}, alt=""))
    (line,) = tags(image, "path")
    pieces = line.attrib["d"].split("M")[1:]
    assert [len(piece.split()) for piece in pieces] == [4, 3, 1]
    assert labels(image) == ["9", "0", "0", "step 9"]


# ---- of the live panel


def curve_of(points):
    curve = Curve()
    for step, value in points:
        curve.add(step, value)
    return curve


def falling(steps=300):
    return curve_of((float(step), math.exp(-step / 50)) for step in range(steps))


def render_charts(shown, **how):
    metrics = {name: {"": curve} for name, curve in shown.items()}
    return str(draw_metrics(metrics, is_live=True, **how))


def heights(markup):
    """The heights of the points of each line, from the top."""
    lines = re.findall(r" d='([^']*)'", markup)
    return [
        [float(pair.split(",")[1]) for pair in line.replace("M", " ").split()] for line in lines
    ]


def test_the_values_themselves_are_pale_behind_a_smooth_line():
    noisy = curve_of((float(step), step % 2) for step in range(100))
    (only,) = heights(render_charts({"loss": noisy}))
    smooth_curve = noisy.with_points(smoothed(noisy.points(), 0.97))
    markup = draw_metrics({"loss": {"": smooth_curve, "as logged": noisy}}, is_live=True)
    raw, smooth = heights(markup)
    assert raw == only
    assert max(smooth[9:]) - min(smooth[9:]) < (max(raw) - min(raw)) / 3
    colours = re.findall(r"<path.*? stroke='(#\w+)'", markup)
    assert colours == ["#808080", "#2f86d6"]


def test_a_logarithmic_scale_is_straight_for_an_exponential_and_left_out_at_zero():
    (line,) = heights(render_charts({"loss": falling()}, is_log=True))
    middle = line[len(line) // 2]
    assert middle == pytest.approx((line[0] + line[-1]) / 2, abs=12)
    below = {"x": curve_of([(0, -1.0), (1, 1.0)])}
    assert heights(render_charts(below, is_log=True)) == heights(render_charts(below))
    # It is said, as well: nothing would change at the click otherwise.
    assert "x\xa0 1\xa0 linear" in Tags(render_charts(below, is_log=True)).text
    assert "linear" not in Tags(render_charts({"loss": falling()}, is_log=True)).text
    assert "linear" not in Tags(render_charts(below)).text


def test_a_value_that_stays_is_a_line_in_the_middle_with_one_label():
    flat = {"lr": curve_of([(0, 0.1), (9, 0.1)])}
    for is_log in (False, True):
        markup = render_charts(flat, is_log=is_log)
        assert heights(markup) == [[200, 200]]
        assert re.findall("na-tick-([a-z]+)", markup) == ["middle"]


def test_a_single_value_and_one_that_is_no_number():
    shown = {"best": curve_of([(3, 0.5)]), "bad": curve_of([(3, math.nan)])}
    page = Tags(render_charts(shown))
    assert "best\xa0 0.5" in page.text
    assert "bad\xa0 nan" in page.text
    assert "svg" not in page.tags


def test_a_page_is_small():
    curve = falling()
    drawn = {"": curve.with_points(smoothed(curve.points(), 0.9)), "as logged": curve}
    markup = draw_metrics({f"{HOSTILE}{n}": drawn for n in range(6)}, is_live=True)
    assert message_bytes(markup) < 24_000
    assert "script" not in Tags(markup).tags


def live(steps, **values):
    curves = LiveCurves()
    for step in range(steps):
        curves.add(0, step, {name: value(step) for name, value in values.items()})
    return curves


def drawn(curves, *, is_log=False):
    view = MetricsView(PanelWidgets())
    field(view.box, "Scale").value = is_log
    view.draw(curves, now=0.0)
    return str(view.box.children[-1].value)


def test_a_range_of_steps_without_values_has_no_chart():
    view = MetricsView(PanelWidgets(), original=("old", lambda: {"loss": falling()}))
    field(view.box, "Steps").value = "200 to 250"
    view.draw(live(100, loss=lambda step: 1 / (step + 1)), now=0.0)
    assert Tags(view.box.children[-1].value).text == "pale: oldloss\xa0 0.01"


@pytest.mark.parametrize("steps", [221, 1_250, 20_000])
def test_metrics_of_one_call_cover_one_range(steps):
    markup = drawn(live(steps, loss=lambda s: 1 / (s + 1) + s % 7, epoch=lambda s: s * 4 // steps))
    lines = re.findall(r" d='M([^']*)'", markup)
    ends = [[pair.split(",")[0] for pair in (line.split()[0], line.split()[-1])] for line in lines]
    assert ends == [["0", "480"]] * 2
    assert (
        re.findall(r"<div class='na-chart-steps'><span>0</span>.*?step ([\d,]*)<", markup)
        == [f"{steps - 1:,}"] * 2
    )


@pytest.mark.parametrize("steps", [100, 5_000])
def test_what_is_not_finite_is_said_and_leaves_a_gap(steps):
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
    for found in (markup, drawn_with_log):
        before, after = re.findall(r" d='([^']*)'", found)
        assert (before.count("M"), after.count("M")) == (1, 2)
        # Beside the value: in a line of its own it would move what stands below as it comes.
        assert "not finite since step 41</span></div><div class='na-plot'" in found


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 3, ["0", "3"]),
        (3e9, 3.00002e9, ["3e9", "3.00002e9"]),
        (3.00001, 3.00002, ["3.00001", "3.00002"]),
        (1_240.4, 1_250.4, ["1240", "1250"]),
        (-1.7e308, 1.7e308, ["-1.7e308", "1.7e308"]),
    ],
)
def test_labels_of_an_axis_are_distinct(low, high, texts):
    image = image_of(chart({"": [(0, low), (1, high)]}, alt=""))
    assert sorted(labels(image)[:2], key=str) == sorted(texts)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (3e-4, 3e-4, "0.0003"),
        (123_456.0, 123_456.0, "123,456"),
        (-12345.678, -12345.679, "-12345.678"),
    ],
)
def test_a_label_is_short_and_never_cut(low, high, text):
    points = [(0, low), (1, high)]
    saved = image_of(chart({"": points}, alt=""))
    assert text in labels(saved)
    (anchor,) = (float(one.attrib["x"]) for one in tags(saved, "text") if one.text == text)
    # A digit of the saved chart's font takes some six pixels, and of the live chart's less.
    assert anchor > 6.2 * len(text)
    markup = drawn(live(2, lr=dict(points).__getitem__))
    assert f">{text}</span>" in markup
    room = re.search(r"--left:(\d+)px", markup)
    assert (int(room[1]) if room else 50) - 6 > 5.6 * len(text)


def test_a_new_metric_leaves_the_page_that_somebody_reads():
    curves = LiveCurves()
    curves.add(0, 0, {f"eval/{number}": 1.0 for number in range(7)} | {"loss": 1.0})
    view = MetricsView(PanelWidgets())
    view.draw(curves, now=0.0)
    chosen = field(view.box, "Which metrics")
    assert [label for label, _ in chosen.options][1:3] == ["metrics 7-8 of 8", "eval/ 1-6 of 7"]
    chosen.label = "eval/ 7 of 7"
    view.draw(curves, now=10.0)
    assert re.findall("class='na-name' title='(.*?)'", view.box.children[-1].value) == ["eval/6"]
    curves.add(0, 1, {"train/accuracy": 1.0})
    view.draw(curves, now=20.0)
    assert (chosen.label, len(chosen.options)) == ("eval/ 7 of 7", 5)
    # A group is named as metrics are, however long its name is.
    curves.add(0, 2, {"\x1b[2J" + "long" * 1000 + "/loss": 1.0})
    view.draw(curves, now=40.0)
    label = chosen.options[-1][0]
    assert (label[:8], label[-7:], len(label)) == ("longlong", "n…/ (1)", 45)


NAMES = ("train/loss", "eval/loss", "eval/accuracy", "learning_rate", "grad_norm", "throughput")


def live_run(number, names=NAMES):
    value = lambda step: math.exp(-step / (90 + 9 * number)) + math.sin(step * (3 + number)) / 9  # noqa: E731
    curves = live(500, **dict.fromkeys(names, value))
    about = f"lr=0.{number + 1}, width={2**number}, optimizer='adamw', schedule='cosine'"
    state = replace(running(1), run=f"20260131-120000-1a2b3{number}", arguments=about)
    state = after(state, logged(0, dict.fromkeys(names, value(499)), 499))
    metrics = SimpleNamespace(flush=lambda: None)
    folder = SimpleNamespace(check=lambda: None)
    call = SimpleNamespace(curves=curves, ended=Event(), metrics=metrics, folder=folder)
    return SimpleNamespace(id=state.run, name="train", state=state, status="running", _call=call)


def test_a_comparison_of_ten_runs_that_train_is_small_with_its_table():
    runs = called([(f"train ({run.id})", run) for run in map(live_run, range(10))])
    charts = Charts(runs, of="these runs", table=RunTable([], [*runs.items()]))
    shown = []
    slot = SimpleNamespace(show=shown.append)
    charts._draw(slot, is_live=True)
    assert sum(map(message_bytes, shown[0].values())) < 20_000
    page = Tags(shown[0]["text/html"])
    assert (page.tags.count("path"), page.tags.count("tr")) == (60, 11)
    # What a saved notebook keeps of it, too.
    assert len(charts._repr_html_()) < 40_000


def test_cells_of_the_table_have_their_colours_whatever_metrics_are_called():
    run = live_run(0, ["error", "state", "loss curve"])
    run.state, run.status = with_failed(run.state, [0], error="ValueError: bad"), "failed"
    html = str(RunTable([], [("train", run)])._repr_html_())
    colours = re.findall(r"<td style='[^']*?(?:;color:(#\w+))?'", html)
    titles = re.findall("<th [^>]*>([^<]*)", html)
    coloured = [each for each in zip(titles, colours, strict=True) if each[1]]
    red = "#cf4f57"
    assert coloured == [("state", red), ("error", red), ("error curve", COLOURS[0])]
