from __future__ import annotations

import base64
import math
import xml.etree.ElementTree as ET

import pytest

from notebook_accel.notebook.charts import chart, colour_of, thin_out, tick
from tests.notebook.test_markup import Tags


def drawn(markup: str) -> ET.Element:
    """The image inside of an ``<img>``."""
    source = dict(Tags(markup).attributes)["src"]
    assert source is not None
    kind, data = source.split(",")
    assert kind == "data:image/svg+xml;base64"
    return ET.fromstring(base64.b64decode(data))


def tags(image: ET.Element, name: str) -> list[ET.Element]:
    return list(image.iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def test_a_chart_is_one_image_with_a_line_for_each_curve() -> None:
    curve = [(float(step), 1.0 / (step + 1)) for step in range(50)]
    markup = chart({0: curve, 9: curve}, alt="loss: 1 → 0.02")
    assert Tags(markup).tags == ["img"]
    assert dict(Tags(markup).attributes)["alt"] == "loss: 1 → 0.02"
    image = drawn(markup)
    # That of the rank's number, as in the live panel.
    colours = [line.attrib["stroke"] for line in tags(image, "polyline")]
    assert colours == [colour_of(0), colour_of(9)] == [colour_of(8), colour_of(1)]
    assert [text.text for text in tags(image, "text")] == ["1", "0.51", "0.02", "0", "step 49"]


@pytest.mark.parametrize("most", [1e9, 1.7e308, 5e-324])
def test_every_point_lies_inside_of_the_image(most: float) -> None:
    image = drawn(chart({0: [(0, -most), (5, most), (9, 0.0)]}, alt=""))
    width, height = float(image.attrib["width"]), float(image.attrib["height"])
    (line,) = tags(image, "polyline")
    for pair in line.attrib["points"].split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_what_is_not_finite_is_left_out() -> None:
    points = [(0.0, 1.0), (1.0, math.nan), (2.0, math.inf), (3.0, 2.0)]
    (line,) = tags(drawn(chart({0: points}, alt="")), "polyline")
    assert len(line.attrib["points"].split()) == 2
    assert not tags(drawn(chart({0: [(0.0, math.nan)]}, alt="")), "polyline")


def test_a_flat_curve_and_a_single_point_are_drawn() -> None:
    assert tags(drawn(chart({0: [(0.0, 3.0), (1.0, 3.0)]}, alt="")), "polyline")
    assert tags(drawn(chart({0: [(4.0, 3.0)]}, alt="")), "circle")


def test_thinning_keeps_peaks_and_order() -> None:
    points = [(float(x), 0.0) for x in range(100_000)]
    points[12_345] = (12_345.0, 7.0)
    points[70_000] = (70_000.0, -7.0)
    kept = thin_out(points, 160)
    assert len(kept) <= 160
    assert kept == sorted(kept)
    assert {(12_345.0, 7.0), (70_000.0, -7.0)} <= set(kept)


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
