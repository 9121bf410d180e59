"""Curves as SVG, without a plotting library: a pure function of numbers.

:func:`chart` gives an image for saved notebooks: their sanitisers drop inline SVG and variables
but keep an ``<img>`` with a data URI, so its colours are mid tones that read on light and dark.
"""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from notebook_accel.launch.text import wording
from notebook_accel.notebook.markup import Markup, element

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_accel.launch.control.plotting import Point

__all__ = ["chart", "colour_of", "share_of", "thin_out", "tick"]

# Mid tones: at least 3:1 against white and against #1e1e1e alike.
_COLOURS = (
    "#2f86d6",
    "#d9752b",
    "#3a9a55",
    "#a86bd1",
    "#cf4f57",
    "#8a7a3a",
    "#3d9aa6",
    "#808080",
)
_GREY = "#808080"
_VALUE = itemgetter(1)
# Of a curve, whose chart is 240 pixels wide; more make the saved notebook larger, not the picture.
_MAX_POINTS = 160


def thin_out(points: Sequence[Point], limit: int = _MAX_POINTS) -> list[Point]:
    """Reduce a curve to at most ``limit`` points, so that no peak is lost.

    The curve is cut into stretches, and the lowest and the highest point of each are kept.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        low, high = min(stretch, key=_VALUE), max(stretch, key=_VALUE)
        kept.extend(sorted({low, high}))
    return kept


def colour_of(rank: int) -> str:
    """The colour of a rank's lines wherever they are drawn, and of the mean's (-1)."""
    return _COLOURS[max(0, rank) % len(_COLOURS)]


def chart(curves: Mapping[int, Sequence[Point]], *, alt: str, width: int = 250) -> Markup:
    """Draw curves over their steps as an ``<img>``, with labelled axes.

    Args:
        curves: points (x, y) of each rank, in the order of x.
        alt: what the image shows, for those who cannot see it.
        width: in pixels; the height follows.
    """
    height = width * 9 // 20
    image = _svg({rank: _finite(points) for rank, points in curves.items()}, width, height)
    data = base64.b64encode(image.encode()).decode()
    return element(
        "img", alt=alt, width=width, height=height, src=f"data:image/svg+xml;base64,{data}"
    )


@dataclass(frozen=True)
class _Box:
    """The rectangle in which curves are drawn, in pixels of the image."""

    left: float
    top: float
    width: float
    height: float


def _svg(curves: Mapping[int, Sequence[Point]], width: int, height: int) -> Markup:
    # Images of many curves stay small: a notebook keeps them for good.
    limit = max(40, min(_MAX_POINTS, 2 * _MAX_POINTS // max(1, len(curves))))
    filled = {rank: thin_out(points, limit) for rank, points in curves.items() if points}
    box = _Box(54, 8, width - 66, height - 28)
    bounds = _bounds(list(filled.values()) or [[(0.0, 0.0)]])
    lines = [_line(points, box, bounds, colour_of(rank)) for rank, points in filled.items()]
    return element(
        "svg",
        *_axes(box, bounds),
        *lines,
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        font_family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif",
        font_size="11",
        fill=_GREY,
    )


def _line(points: Sequence[Point], box: _Box, bounds: tuple[Point, Point], colour: str) -> Markup:
    if len(points) == 1:
        x, y = _pixel(points[0], box, bounds)
        return element("circle", cx=round(x, 1), cy=round(y, 1), r=3, fill=colour)
    return element(
        "polyline",
        points=_scaled(points, box, bounds),
        fill="none",
        stroke=colour,
        stroke_width="1.8",
        stroke_linejoin="round",
    )


def _axes(box: _Box, bounds: tuple[Point, Point]) -> list[Markup]:
    (x_low, y_low), (x_high, y_high) = bounds
    bottom, right = box.top + box.height, box.left + box.width
    middle = box.top + box.height / 2
    grid = [
        element(
            "path",
            d=f"M{box.left} {y}H{right}",
            stroke=_GREY,
            stroke_opacity="0.35",
            stroke_width="1",
        )
        for y in (box.top, middle, bottom)
    ]
    left = box.left - 6
    return [
        *grid,
        _text(tick(y_high), left, box.top + 4, "end"),
        _text(tick(y_low / 2 + y_high / 2), left, middle + 4, "end"),
        _text(tick(y_low), left, bottom + 4, "end"),
        _text(wording.number(x_low), box.left, bottom + 16, "start"),
        _text(f"step {wording.number(x_high)}", right, bottom + 16, "end"),
    ]


def tick(value: float) -> str:
    """A label that fits beside an axis: ``1,240``, ``-1.2e6``."""
    text = wording.number(value)
    if len(text) > 7 or "e" in text:
        text = re.sub(r"(\.0)?e\+?(-?)0*", r"e\2", f"{value:.1e}")
    return text


def _text(text: str, x: float, y: float, anchor: str) -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor)


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(float(x), float(y)) for x, y in points if math.isfinite(y)]


def _bounds(curves: Sequence[Sequence[Point]]) -> tuple[Point, Point]:
    """The corners (x, y), lowest and highest, between which all curves lie."""
    x_low, x_high = _range([x for points in curves for x, _ in points])
    y_low, y_high = _range([y for points in curves for _, y in points])
    return (x_low, y_low), (x_high, y_high)


def _range(values: Sequence[float]) -> Point:
    """Lowest and highest value; around a flat curve some room, since scales divide by it."""
    low, high = min(values), max(values)
    room = 0.0 if low < high else abs(low) * 0.1 or 1.0
    return low - room, high + room


def share_of(value: float, low: float, high: float) -> float:
    """How far ``value`` is from ``low`` to ``high``: 0 to 1, and 0 where these are equal."""
    if low == high:
        return 0.0
    if math.isinf(high - low):  # the difference is more than a float holds
        value, low, high = value / 2, low / 2, high / 2
    return (value - low) / (high - low)


def _pixel(point: Point, box: _Box, bounds: tuple[Point, Point]) -> Point:
    (x_low, y_low), (x_high, y_high) = bounds
    across, up = share_of(point[0], x_low, x_high), share_of(point[1], y_low, y_high)
    return box.left + across * box.width, box.top + (1 - up) * box.height


def _scaled(points: Sequence[Point], box: _Box, bounds: tuple[Point, Point]) -> str:
    pixels = (_pixel(point, box, bounds) for point in points)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
