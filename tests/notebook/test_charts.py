from __future__ import annotations

import base64
import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from notebook_accel.notebook.charts import chart, colour_of, thin_out, tick, ticks
from tests.notebook.test_markup import Tags


def drawn(markup: str) -> ET.Element:
    """The images inside of both ``<img>``: that of the labels, and that of the curves."""
    both = ET.Element("both")
    for name, source in Tags(markup).attributes:
        if name == "src":
            kind, data = (source or "").split(",")
            assert kind == "data:image/svg+xml;base64"
            both.append(ET.fromstring(base64.b64decode(data)))
    return both


def tags(image: ET.Element, name: str) -> list[ET.Element]:
    return list(image.iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def labels(image: ET.Element) -> list[str | None]:
    return [text.text for text in tags(image, "text")]


def test_a_chart_is_an_image_with_a_line_for_each_curve() -> None:
    curve = [(float(step), 1.0 / (step + 1)) for step in range(50)]
    markup = chart({0: curve, 9: curve}, alt="loss: 1 → 0.02")
    assert Tags(markup).tags == ["div", "img", "img"]
    alts = [value for name, value in Tags(markup).attributes if name == "alt"]
    assert alts == ["", "loss: 1 → 0.02"], "the labels say nothing to those who cannot see them"
    image = drawn(markup)
    # That of the rank's number, as in the live panel.
    colours = [line.attrib["stroke"] for line in tags(image, "path")]
    assert colours == [colour_of(0), colour_of(9)] == [colour_of(8), colour_of(1)]
    assert labels(image) == ["1", "0.51", "0.02", "0", "step 49"]


@pytest.mark.parametrize("most", [1e9, 1.7e308, 5e-324])
def test_every_point_lies_inside_of_the_image(most: float) -> None:
    image = drawn(chart({0: [(0, -most), (5, most), (9, 0.0)]}, alt=""))
    # Of the box that stretches with the page, beside which the labels stand.
    (box,) = (found for found in tags(image, "svg") if "viewBox" in found.attrib)
    width, height = map(float, box.attrib["viewBox"].split()[2:])
    (line,) = tags(image, "path")
    for pair in line.attrib["d"].removeprefix("M").split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_a_line_has_a_gap_where_a_value_is_not_finite() -> None:
    points = [(float(x), float(x)) for x in range(10)]
    points[4] = (4.0, math.nan)
    points[8] = (8.0, math.inf)
    image = drawn(chart({0: points}, alt=""))
    (line,) = tags(image, "path")
    pieces = line.attrib["d"].split("M")[1:]
    assert [len(piece.split()) for piece in pieces] == [4, 3, 1]
    assert labels(image) == ["9", "5", "0", "0", "step 9"]


@pytest.mark.parametrize("number", [100, 5_000])
def test_the_axis_goes_to_the_last_step_that_was_logged(number: int) -> None:
    points = [(float(x), 1 / (x + 1) if x < 40 else math.nan) for x in range(number)]
    image = drawn(chart({0: points}, alt=""))
    assert labels(image)[-2:] == ["0", f"step {number - 1:,}"]
    none = drawn(chart({0: [(x, math.nan) for x, _ in points]}, alt=""))
    assert labels(none) == ["0", f"step {number - 1:,}"]
    assert not tags(none, "path")


def test_a_flat_curve_and_a_single_point_are_drawn() -> None:
    flat = drawn(chart({0: [(0.0, 3.0), (1.0, 3.0)]}, alt=""))
    assert tags(flat, "path")
    assert labels(flat) == ["3", "0", "step 1"]
    (point,) = tags(drawn(chart({0: [(4.0, 3.0)]}, alt="")), "path")
    assert point.attrib["d"].endswith("h0")


def test_thinning_keeps_peaks_and_order() -> None:
    points = [(float(x), 0.0) for x in range(100_000)]
    points[12_345] = (12_345.0, 7.0)
    points[70_000] = (70_000.0, -7.0)
    kept = thin_out(points, 160)
    assert len(kept) <= 160
    assert kept == sorted(kept)
    assert {(12_345.0, 7.0), (70_000.0, -7.0)} <= set(kept)


@pytest.mark.parametrize("number", [161, 221, 1_250, 5_000])
def test_thinning_keeps_both_ends(number: int) -> None:
    falling = [(float(x), 1 / (x + 1) + 0.1 * (x % 7)) for x in range(number)]
    epochs = [(float(x), float(4 * x // number)) for x in range(number)]
    for points in (falling, epochs):
        kept = thin_out(points, 160)
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert len(kept) <= 160


def test_thinning_keeps_an_even_spacing() -> None:
    points = [(float(x), float(x)) for x in [*range(5_000), *range(5_000, 100_000, 500)]]
    xs = [x for x, _ in thin_out(points, 160)]
    assert max(after - before for before, after in pairwise(xs)) < 100_000 / 70


def test_thinning_keeps_a_gap_of_one_value() -> None:
    points = [(float(x), 1.0 + x) for x in range(5_000)]
    points[1_234] = (1_234.0, math.nan)
    kept = thin_out(points, 160)
    assert [x for x, y in kept if math.isnan(y)] == [1_234]
    assert len(kept) <= 160


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0, 3], ["0", "3"]),
        ([3e9, 3.00002e9, 3.00004e9], ["3e9", "+20,000", "+40,000"]),
        ([3e9, 3.000099995e9, 3.00019999e9], ["3e9", "+1e5", "+2e5"]),
        ([3e9, 3.1e9], ["3e9", "3.1e9"]),
        ([1_234_567, 1_239_567], ["1.23e6", "1.24e6"]),
        ([3.00001, 3.00002], ["3.00001", "3.00002"]),
        ([-1.7e308, 0, 1.7e308], ["-1.7e308", "0", "1.7e308"]),
    ],
)
def test_labels_of_an_axis_are_distinct(values: list[float], texts: list[str]) -> None:
    assert ticks(values) == texts


def test_whole_numbers_have_whole_labels() -> None:
    def of(high: int) -> list[str | None]:
        points = [(float(x), float(x * high // 20)) for x in range(21)]
        return labels(drawn(chart({0: points}, alt="")))[:-2]

    assert of(3) == ["3", "2", "0"]
    assert of(4) == ["4", "2", "0"]
    assert of(1) == ["1", "0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "0.25"),
        (1240, "1,240"),
        (-1e5, "-1e5"),
        (-1234567.0, "-1.2e6"),
        (1e-12, "1e-12"),
        (9.99e99, "1e100"),
        (-0.00012345, "-1.2e-4"),
    ],
)
def test_a_label_beside_an_axis_is_short(value: float, text: str) -> None:
    assert tick(value) == text
    assert len(text) <= 7
