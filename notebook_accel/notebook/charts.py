"""Curves as SVG, without a plotting library: pure functions of numbers.

    curves --> _draw --> render_charts   the live panel: HTML around an inline SVG
                    +--> saved_chart     a saved notebook: two images

The box stretches with the page, so the numbers stand beside it, where they keep their size. A saved
notebook has images: its sanitisers drop inline SVG and variables but keep an ``<img>`` with a data
URI. So all colours are mid tones that read on light and dark.

A new kind of live chart is a row of ``KINDS``, from which the panel takes its choices.
"""

from __future__ import annotations

import base64
import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view.progress import name_of, not_finite_note, spread
from notebook_accel.notebook.markup import Markup, element, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from notebook_accel.launch.control.curves import Curve
    from notebook_accel.launch.control.plotting import Point

__all__ = [
    "KINDS",
    "MAX_LINES",
    "PAGE_SIZE",
    "Look",
    "colour_of",
    "render_charts",
    "saved_chart",
    "thin_out",
]

# Charts that the live panel draws at once; they share the points below.
PAGE_SIZE = 6
# Of more ranks the live panel draws their mean.
MAX_LINES = 8
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
# The box that stretches, in units of its own: the curves lie between _TOP and _BOTTOM.
_WIDTH, _HEIGHT, _TOP, _BOTTOM = 480, 400, 24, 376
# Points of a curve; more make the message and the notebook larger, not the picture.
_MAX_POINTS = 160
# Of all live charts of a page; a point takes eight bytes, a stripe about a hundred.
_MAX_LIVE_POINTS = 1_000
_MAX_STRIPES = 48
# Of one live chart: points of the mean, and stripes.
_MEAN_POINTS = 120
_STRIPES = 20
# Stands for a rank where the mean of all is drawn.
_MEAN = -1
# Pixels of a saved chart: the labels beside it, its height, and the height of the box in that.
_LEFT, _SAVED_HEIGHT, _BOX = 54, 112, 98


@dataclass(frozen=True, kw_only=True)
class Look:
    """Options of live charts: kind, scale and smoothing.

    Attributes:
        kind: which lines are drawn: a name in ``KINDS``.
        is_log: a logarithmic scale, where all values are above zero.
        smoothing: 0 to 1: how much of the smoothed value before each one keeps.
    """

    kind: str = "each rank"
    is_log: bool = False
    smoothing: float = 0.0


def colour_of(rank: int) -> str:
    """Return the CSS colour of a rank's lines, and of the mean's for -1."""
    return _COLOURS[max(0, rank) % len(_COLOURS)]


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
        return int(_share(point[0], first[0], last[0]) * num * (1 - 1e-9))

    kept = [first]
    for _, stretch in groupby(points, key=number):
        found = list(stretch)
        finite = [point for point in found if math.isfinite(point[1])]
        picked = {min(finite, key=_VALUE), max(finite, key=_VALUE)} if finite else set()
        picked.update([point for point in found if not math.isfinite(point[1])][:1])
        kept.extend(sorted(picked - {first, last}))
    return [*kept, last]


# ---- the one renderer ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """Drawn curves: SVG paths, range of steps, and labels of the value axis.

    Attributes:
        lines: a path for each curve that has a finite value.
        first, last: the lowest and the highest step.
        labels: of the value axis, by where they stand: "top" and "bottom", or "middle" where all
            values are one; none where no value is finite.
    """

    lines: Sequence[Markup]
    first: float
    last: float
    labels: Mapping[str, str]


def _polyline(places: Sequence[str]) -> str:
    """Return the SVG path through points; a single point becomes a dot."""
    return f"M{' '.join(places)}" if len(places) > 1 else f"M{places[0]}h0"


def _draw(
    curves: Mapping[int, Sequence[Point]],
    *,
    limit: int,
    is_log: bool = False,
    path_of: Callable[[Sequence[str]], str] = _polyline,
) -> _Drawn:
    """Draw curves, given in the order of their steps, with at most ``limit`` points each.

    A line has a gap where a value is not finite.
    """
    scale = math.log10 if is_log else float
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points if math.isfinite(y)]
    first, last, low, high = min(xs), max(xs), min(ys, default=0.0), max(ys, default=0.0)
    # The means of equal numbers differ in their last digits.
    is_flat = math.isclose(low, high, rel_tol=1e-12)
    bottom, top = (0.0, 0.0) if is_flat else (scale(low), scale(high))

    def place(point: Point) -> str:
        across = _share(point[0], first, last) * _WIDTH
        up = 0.5 if is_flat else _share(scale(point[1]), bottom, top)
        return f"{across:.0f},{_BOTTOM - up * (_BOTTOM - _TOP):.0f}"

    lines = []
    for rank, points in curves.items():
        path = ""
        for is_finite, piece in groupby(thin_out(points, limit), lambda p: math.isfinite(p[1])):
            if is_finite:
                path += path_of([*map(place, piece)])
        if path:
            lines.append(
                element("path", d=path, stroke=colour_of(rank), vector_effect="non-scaling-stroke")
            )
    labels = {}
    if ys:
        texts = _labels(low, high)
        labels = {"middle": texts[0]} if is_flat else {"top": texts[1], "bottom": texts[0]}
    return _Drawn(lines=lines, first=first, last=last, labels=labels)


def _svg(parts: Iterable[Markup], **attributes: str | float) -> Markup:
    """Return an SVG chart box, whose lines keep their width as it stretches."""
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        fill="none",
        stroke_width=1.6,
        stroke_linejoin="round",
        stroke_linecap="round",
        **attributes,
    )


def _labels(low: float, high: float) -> tuple[str, str]:
    """Return both values as text, with as many digits as tell them apart."""
    digits = 4 if max(abs(low), abs(high)) >= 1000 else 3
    texts = wording.number(low, digits), wording.number(high, digits)
    while texts[0] == texts[1] and digits < 17:
        digits += 1
        texts = wording.number(low, digits), wording.number(high, digits)
    return texts


def _share(value: float, low: float, high: float) -> float:
    """Return how far ``value`` lies from ``low`` to ``high``, 0 to 1; 0 if these are equal."""
    if low == high:
        return 0.0
    if math.isinf(high - low):  # the difference is more than a float holds
        value, low, high = value / 2, low / 2, high / 2
    return (value - low) / (high - low)


# ---- of a saved notebook -------------------------------------------------------------------


def saved_chart(curves: Mapping[int, Sequence[Point]], *, alt: str) -> Markup:
    """Return a chart for saved notebooks: an ``<img>`` of curves beside one of labels.

    Args:
        curves: points (x, y) of each rank, in the order of x.
        alt: what the image shows, for those who cannot see it.
    """
    # Images of many curves stay small: a notebook keeps them for good.
    limit = max(40, min(_MAX_POINTS, 2 * _MAX_POINTS // max(1, len(curves))))
    drawn = _draw(curves, limit=limit)
    heights = {
        "top": _TOP * _BOX / _HEIGHT,
        "middle": _BOX / 2,
        "bottom": _BOTTOM * _BOX / _HEIGHT,
    }
    grid = [
        element("line", x2="100%", y1=y, y2=y, stroke=_GREY, opacity=0.35) for y in heights.values()
    ]
    labels = [_text(text, _LEFT - 6, heights[at] + 4, "end") for at, text in drawn.labels.items()]
    end, foot = f"step {wording.count(drawn.last)}", _SAVED_HEIGHT - 5
    steps = [_text(end, "50%", foot, "middle")]
    if drawn.first != drawn.last:
        first = _text(wording.count(drawn.first), 0, foot, "start")
        steps = [first, _text(end, "100%", foot, "end")]
    box = _svg(drawn.lines, width="100%", height=_BOX)
    images = [
        _image(labels, alt="", width=_LEFT, style=f"width:{_LEFT}px"),
        _image([*grid, box, *steps], alt=alt, width=_WIDTH, style=f"width:calc(100% - {_LEFT}px)"),
    ]
    return element("div", *images, style="white-space:nowrap;line-height:0")


def _image(parts: Sequence[Markup], *, alt: str, width: int, style: str) -> Markup:
    svg = element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        width="100%",
        height=_SAVED_HEIGHT,
        font_family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif",
        font_size="11",
        fill=_GREY,
    )
    return element(
        "img",
        alt=alt,
        width=width,
        height=_SAVED_HEIGHT,
        src=f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}",
        style=f"{style};height:{_SAVED_HEIGHT}px;margin:0",
    )


def _text(text: str, x: float | str, y: float, anchor: str) -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor)


# ---- of the live panel ---------------------------------------------------------------------


def render_charts(
    shown: Mapping[str, Mapping[int, Curve]], look: Look, *, num_places: int = 0
) -> Markup:
    """Return the charts of one page as HTML, side by side as far as there is room.

    Args:
        shown: the curve of each rank, by the name of its metric.
        look: how they are drawn.
        num_places: charts for which there is room at least.
    """
    num_lines = sum(min(len(by_rank), MAX_LINES) for by_rank in shown.values())
    limit = max(16, min(_MAX_POINTS, _MAX_LIVE_POINTS // max(1, num_lines)))
    num_stripes = max(6, min(_STRIPES, _MAX_STRIPES // max(1, len(shown))))
    cards = [_card(name, by_rank, look, limit, num_stripes) for name, by_rank in shown.items()]
    cards += [element("div", class_="na-chart")] * (num_places - len(cards))
    columns = {1: 2, 5: 3, 6: 3}.get(len(cards), len(cards))
    return element("div", *cards, class_="na-charts", style=f"--columns:{columns}")


def _card(
    name: str, by_rank: Mapping[int, Curve], look: Look, limit: int, num_stripes: int
) -> Markup:
    kind = KINDS["mean" if len(by_rank) > MAX_LINES else look.kind]
    logged = kind.lines(by_rank)
    is_mean = _MEAN in logged
    lines = {rank: _smoothed(points, look.smoothing) for rank, points in logged.items()}
    last = {rank: curve.last for rank, curve in by_rank.items()}
    finite = [value for value in last.values() if math.isfinite(value)]
    shown = next(iter(last.values()), math.nan)
    if is_mean:
        shown = sum(value / len(finite) for value in finite) if finite else math.nan
    can_be_log = all(y > 0 for points in lines.values() for _, y in points if math.isfinite(y))
    said = not_finite_note({rank: curve.not_finite for rank, curve in by_rank.items()})
    # Beside the steps, where it moves nothing as it comes.
    note = element("span", shorten(said, 120), class_="na-not-finite", title=shorten(said, 200))
    note = note if said else Markup("")
    no_log = element(
        "span", "linear", class_="na-muted", title="a logarithmic scale needs values above zero"
    )
    title = shorten(one_line(name, 90), 120)
    head = element(
        "div",
        element("span", shorten(name_of(name), 60), class_="na-name", title=title),
        element("span", "mean", class_="na-muted") if is_mean else "",
        element("b", wording.number(shown)),
        no_log if look.is_log and not can_be_log else "",
        element("span", spread(last), class_="na-muted na-spread"),
        class_="na-chart-head",
    )
    if not any(len(points) > 1 for points in lines.values()):
        # One value is no curve, and its number says it all.
        return element("div", head, note, class_="na-chart")
    drawn = _draw(lines, limit=limit, is_log=look.is_log and can_be_log, path_of=kind.path_of)
    ends = " to ".join(reversed([*drawn.labels.values()]))
    steps = element(
        "div",
        element("span", wording.count(round(drawn.first))),
        note,
        element("span", f"step {wording.count(round(drawn.last))}"),
        class_="na-chart-steps",
    )
    plot = element(
        "div",
        _svg(drawn.lines, role="img", aria_label=f"from {ends}" if ends else "no value is finite"),
        *(element("span", text, class_=f"na-tick-{at}") for at, text in drawn.labels.items()),
        steps,
        element("div", *_stripes(lines, drawn, num_stripes), class_="na-stripes"),
        class_="na-plot",
    )
    return element("div", head, plot, class_="na-chart")


def _mean(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean curve: at each step, of the curves that are finite there."""
    import numpy as np

    columns = [np.array(points).T for points in curves if points]
    low, high = min(xs[0] for xs, _ in columns), max(xs[-1] for xs, _ in columns)
    grid = np.linspace(low, high, min(_MEAN_POINTS, max(len(xs) for xs, _ in columns)))
    values = np.array([np.interp(grid, xs, ys) for xs, ys in columns])
    is_finite = np.isfinite(values)
    count = np.where(is_finite.any(axis=0), is_finite.sum(axis=0), np.nan)
    means = np.where(is_finite, values / count, 0.0).sum(axis=0)
    return [*zip(grid.tolist(), np.where(np.isnan(count), np.nan, means).tolist(), strict=True)]


def _lines_of_ranks(by_rank: Mapping[int, Curve]) -> Mapping[int, Sequence[Point]]:
    return {rank: curve.points() for rank, curve in by_rank.items()}


def _line_of_mean(by_rank: Mapping[int, Curve]) -> Mapping[int, Sequence[Point]]:
    if len(by_rank) == 1:
        return _lines_of_ranks(by_rank)
    return {_MEAN: _mean([curve.means() for curve in by_rank.values()])}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of live chart.

    Attributes:
        lines: gives the points of each line by its rank; -1 is the line of their mean.
        path_of: gives the SVG path of a line's points, each a text "x,y".
    """

    lines: Callable[[Mapping[int, Curve]], Mapping[int, Sequence[Point]]]
    path_of: Callable[[Sequence[str]], str] = _polyline


KINDS = {"each rank": Kind(lines=_lines_of_ranks), "mean": Kind(lines=_line_of_mean)}


def _smoothed(points: Sequence[Point], weight: float) -> Sequence[Point]:
    """Return an exponential moving mean, bias-corrected as in TensorBoard."""
    if not weight:
        return points
    mean, rest, result = 0.0, 1.0, []
    for x, y in points:
        if not math.isfinite(y):
            result.append((x, y))
            continue
        rest *= weight
        share = (1 - weight) / (1 - rest)
        mean += share * y - share * mean
        result.append((x, mean))
    return result


def _stripes(lines: Mapping[int, Sequence[Point]], drawn: _Drawn, number: int) -> list[Markup]:
    """Return invisible stripes whose tooltips show the values nearest to their middles.

    A tooltip of the page would vanish each time the chart is drawn anew.
    """
    stripes = []
    for index in range(number):
        middle = drawn.first + (drawn.last - drawn.first) * (index + 0.5) / number
        nearest = {rank: _nearest(points, middle) for rank, points in lines.items()}
        values = (
            f"{'mean' if rank == _MEAN else f'rank {rank}'} {wording.number(value)}"
            for rank, (_, value) in nearest.items()
        )
        step = next(iter(nearest.values()))[0]
        text = f"step {wording.count(round(step))}: {', '.join(values)}"
        stripes.append(element("i", element("span", shorten(text, 160))))
    return stripes


def _nearest(points: Sequence[Point], x: float) -> Point:
    """Return the point whose step is nearest to ``x``; points are in the order of their steps."""
    after = bisect_right(points, x, key=_STEP)
    around = points[max(0, after - 1) : after + 1]
    return min(reversed(around), key=lambda point: abs(point[0] - x))
