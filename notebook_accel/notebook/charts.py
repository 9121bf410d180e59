"""Curves as SVG, without a plotting library: a pure function of numbers.

:func:`chart` gives an image for saved notebooks: their sanitisers drop inline SVG and variables
but keep an ``<img>`` with a data URI, so its colours are mid tones that read on light and dark.
"""

from __future__ import annotations

import base64
import math
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from notebook_accel.launch.text import wording
from notebook_accel.notebook.markup import Markup, element

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from notebook_accel.launch.control.plotting import Point

__all__ = ["chart", "colour_of", "line_path", "share_of", "thin_out", "tick", "ticks"]

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
_STEP = itemgetter(0)
_VALUE = itemgetter(1)
# Pixels without a line on each side of a value that is not finite.
_GAP = 2.0
# Characters of a label beside an axis.
_MAX_LABEL = 7
# Points of a curve; more make the saved notebook larger, not the picture.
_MAX_POINTS = 160
# Pixels: of the labels beside a chart, of its height, and of the box with the curves and what is
# above that. Units: of the box's width, which stretch.
_LEFT, _HEIGHT, _BOX, _TOP = 54, 112, 84, 8
_WIDTH = 430


def thin_out(points: Sequence[Point], limit: int = _MAX_POINTS) -> list[Point]:
    """Reduce a curve to at most ``limit`` points, so that no peak is lost.

    The curve is cut into stretches of equally many steps. The lowest and the highest point of each
    are kept, the first that is not finite, and the first and the last point of all.
    """
    if len(points) <= limit:
        return list(points)
    points = sorted(points, key=_STEP)
    first, last = points[0], points[-1]
    num = (limit - 2) // (2 if all(math.isfinite(y) for _, y in points) else 3)

    def number(point: Point) -> int:
        return int(share_of(point[0], first[0], last[0]) * num * (1 - 1e-9))

    kept = [first]
    for _, stretch in groupby(points, key=number):
        found = list(stretch)
        finite = [point for point in found if math.isfinite(point[1])]
        picked = {min(finite, key=_VALUE), max(finite, key=_VALUE)} if finite else set()
        picked.update([point for point in found if not math.isfinite(point[1])][:1])
        kept.extend(sorted(picked - {first, last}))
    return [*kept, last]


def line_path(
    points: Iterable[Point], place: Callable[[Point], Point], *, decimals: int = 0
) -> str:
    """The ``d`` of a line through points, with a gap where a value is not finite.

    Args:
        points: in the order of their steps.
        place: the pixel of a point.
        decimals: of the pixels.
    """
    pieces: list[list[Point]] = []
    gap = -math.inf
    for is_finite, found in groupby(points, key=lambda point: math.isfinite(point[1])):
        if is_finite:
            piece = [place(point) for point in found]
            # What is left out for the gap to be seen never is the whole piece.
            first = next((i for i, (x, _) in enumerate(piece) if x - gap >= _GAP), len(piece) - 1)
            pieces.append(piece[first:])
            continue
        steps = [x for x, _ in found]
        # 1 stands for the value, of which nothing is drawn: any scale has a place for it.
        if pieces:
            start = place((steps[0], 1.0))[0]
            while len(pieces[-1]) > 1 and start - pieces[-1][-1][0] < _GAP:
                pieces[-1].pop()
        gap = place((steps[-1], 1.0))[0]
    texts = [" ".join(f"{x:.{decimals}f},{y:.{decimals}f}" for x, y in piece) for piece in pieces]
    # Of a point between two gaps the round ends of a line of no length are drawn.
    return "".join(f"M{text}" if " " in text else f"M{text}h0" for text in texts)


def colour_of(rank: int) -> str:
    """The colour of a rank's lines wherever they are drawn, and of the mean's (-1)."""
    return _COLOURS[max(0, rank) % len(_COLOURS)]


def chart(curves: Mapping[int, Sequence[Point]], *, alt: str) -> Markup:
    """Draw curves over their steps, as wide as their place: an ``<img>`` beside that of its labels.

    Args:
        curves: points (x, y) of each rank, in the order of x; a line has a gap where y is not
            finite.
        alt: what the image shows, for those who cannot see it.
    """
    # Images of many curves stay small: a notebook keeps them for good.
    limit = max(40, min(_MAX_POINTS, 2 * _MAX_POINTS // max(1, len(curves))))
    filled = {rank: thin_out(points, limit) for rank, points in curves.items() if points}
    points = [point for found in filled.values() for point in found]
    xs = [x for x, _ in points] or [0.0]
    ys = [y for _, y in points if math.isfinite(y)]
    (x_low, x_high), (y_low, y_high) = _range(xs), _range(ys or [0.0])

    def place(point: Point) -> Point:
        across, up = share_of(point[0], x_low, x_high), share_of(point[1], y_low, y_high)
        return across * _WIDTH, (1 - up) * _BOX

    grid = [(round(place((x_low, y))[1], 1), text) for y, text in _grid(y_low, y_high, ys)]
    paths = {rank: line_path(found, place, decimals=1) for rank, found in filled.items()}
    labels = [_text(text, _LEFT - 6, _TOP + y + 4, "end") for y, text in grid if text]
    drawn = [_stretched([y for y, _ in grid], paths), *_steps(min(xs), max(xs))]
    images = [
        _image(labels, alt="", width=_LEFT, style=f"width:{_LEFT}px"),
        _image(drawn, alt=alt, width=_WIDTH, style=f"width:calc(100% - {_LEFT}px)"),
    ]
    return element("div", *images, style="white-space:nowrap;line-height:0")


def _image(parts: Sequence[Markup], *, alt: str, width: int, style: str) -> Markup:
    svg = element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        width="100%",
        height=_HEIGHT,
        font_family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif",
        font_size="11",
        fill=_GREY,
    )
    return element(
        "img",
        alt=alt,
        width=width,
        height=_HEIGHT,
        src=f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}",
        style=f"{style};height:{_HEIGHT}px;margin:0",
    )


def _stretched(grid: Sequence[float], paths: Mapping[int, str]) -> Markup:
    """The lines of a chart, in a box that stretches with the image; they do not get thicker."""
    same = "non-scaling-stroke"
    lines = [
        element("line", x2=_WIDTH, y1=y, y2=y, stroke=_GREY, opacity=0.35, vector_effect=same)
        for y in grid
    ]
    curves = [
        element("path", d=path, stroke=colour_of(rank), stroke_width=1.8, vector_effect=same)
        for rank, path in paths.items()
        if path
    ]
    return element(
        "svg",
        *lines,
        *curves,
        y=_TOP,
        width="100%",
        height=_BOX,
        viewBox=f"0 0 {_WIDTH} {_BOX}",
        preserveAspectRatio="none",
        overflow="visible",
        fill="none",
        stroke_linejoin="round",
        stroke_linecap="round",
    )


def _grid(low: float, high: float, values: Sequence[float]) -> list[tuple[float, str]]:
    """Where horizontal lines are drawn, and their labels; "" where there are no values.

    Args:
        low, high: the range that is drawn.
        values: all that are drawn.
    """
    middle = low / 2 + high / 2
    if not values:
        return [(y, "") for y in (low, middle, high)]
    if min(values) == max(values):
        return [(high, ""), (middle, tick(values[0])), (low, "")]
    # Between whole numbers, such as epochs, half of one means nothing.
    if all(value.is_integer() for value in values):
        middle = math.ceil(middle)
    heights = sorted({low, middle, high})
    return [*zip(heights, ticks(heights), strict=True)][::-1]


def _steps(first: float, last: float) -> list[Markup]:
    end = f"step {wording.count(last)}"
    if first == last:
        return [_text(end, "50%", _HEIGHT - 5, "middle")]
    start = _text(wording.count(first), 0, _HEIGHT - 5, "start")
    return [start, _text(end, "100%", _HEIGHT - 5, "end")]


def tick(value: float, limit: int = _MAX_LABEL) -> str:
    """A label that fits beside an axis: ``1,240``, ``-1.2e6``."""
    text = wording.number(value)
    return text if len(text) <= limit and "e" not in text else _with_digits(value, 2, limit)


def _with_digits(value: float, digits: int, limit: int = _MAX_LABEL) -> str:
    text = wording.number(value, digits)
    if len(text) > limit and "e" not in text:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{mantissa}e{int(exponent)}"
    return text


def ticks(values: Sequence[float]) -> list[str]:
    """Labels of the values of an axis, from the lowest on: as short as tells them apart.

    Where no short label does, those above the lowest say how much more they are: ``+2e4``.

    Args:
        values: different ones, in order.
    """
    texts = [tick(value) for value in values]
    digits = 2
    while len(set(texts)) < len(values):
        digits += 1
        texts = [_with_digits(value, digits) for value in values]
        if max(map(len, texts)) > _MAX_LABEL:
            low = values[0]
            more = [value - low for value in values[1:]]
            texts = [tick(value, _MAX_LABEL - 1) for value in more]
            if any("e" in text for text in texts):  # then all, so that they compare
                texts = [tick(value, 0) for value in more]
            return [tick(low), *(f"+{text}" for text in texts)]
    return texts


def _text(text: str, x: float | str, y: float, anchor: str) -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor)


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
