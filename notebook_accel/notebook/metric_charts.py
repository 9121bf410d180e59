"""The live charts of metrics as HTML: a pure function of the curves and of what is chosen.

Each chart is one SVG that stretches with the page; its numbers stand beside it as text, where they
keep their size. Invisible stripes over it hold the values, and the one below the pointer shows its
own: a tooltip of the page would vanish each time the chart is drawn anew.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view.progress import name_of, not_finite_note, spread
from notebook_accel.notebook.charts import colour_of, line_path, share_of, thin_out, tick, ticks
from notebook_accel.notebook.markup import Markup, element, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_accel.launch.control.curves import NotFinite
    from notebook_accel.launch.control.plotting import Point

__all__ = ["MAX_LINES", "PAGE_SIZE", "Chart", "Look", "groups_of", "render_charts"]

# Charts that are drawn at once; they share the points below.
PAGE_SIZE = 6
# Of more ranks their mean is drawn, and the range around it.
MAX_LINES = 8
_ALL = ""
# Stands for a rank where the mean of all is drawn.
_MEAN = -1
_WIDTH, _HEIGHT = 240, 64
# Between the lowest and the highest value; the rest is for the width of lines.
_ROOM = _HEIGHT - 8
# Of one chart: points of the mean, and stripes of the range around it. A point each two pixels.
_MEAN_POINTS = 120
_STRIPES = 20
# Of all charts of a page; a point takes seven bytes, a stripe about a hundred.
_MAX_POINTS = 1_000
_MAX_STRIPES = 48


@dataclass(frozen=True, kw_only=True)
class Look:
    """How charts are drawn.

    Attributes:
        is_mean: the mean of all ranks, instead of a line a rank.
        is_log: a logarithmic scale, where all values are above zero.
        smoothing: 0 to 1: how much of the smoothed value before each one keeps.
    """

    is_mean: bool = False
    is_log: bool = False
    smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One metric, by rank.

    Attributes:
        name: of the metric.
        points: (step, value), in order of the steps; a line has a gap where a value is not finite.
        means: the same, evened out where the curve is long; needed where the mean is drawn.
        last: the last values.
        not_finite: how many values are nan or infinite, and since when.
    """

    name: str
    points: Mapping[int, Sequence[Point]]
    means: Mapping[int, Sequence[Point]]
    last: Mapping[int, float]
    not_finite: Mapping[int, NotFinite] = field(default_factory=dict)


def groups_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Names by what comes before their first slash; all of them under ""."""
    groups: dict[str, list[str]] = {_ALL: list(names)}
    for name in names:
        prefix, slash, _ = name.partition("/")
        if slash and prefix:
            groups.setdefault(prefix, []).append(name)
    return groups


def render_charts(shown: Sequence[Chart], look: Look, *, num_places: int = 0) -> Markup:
    """The charts of one page, side by side where there is room, with room for ``num_places``."""
    num_lines = sum(min(len(chart.points), MAX_LINES) for chart in shown)
    limit = max(16, min(160, _MAX_POINTS // max(1, num_lines)))
    num_stripes = max(6, min(_STRIPES, _MAX_STRIPES // max(1, len(shown))))
    cards = [_card(chart, look, limit, num_stripes) for chart in shown]
    cards += [element("div", class_="na-chart")] * (num_places - len(cards))
    columns = {1: 2, 5: 3, 6: 3}.get(len(cards), len(cards))
    return element("div", *cards, class_="na-charts", style=f"--columns:{columns}")


def _card(chart: Chart, look: Look, limit: int, num_stripes: int) -> Markup:
    logged = {rank: points for rank, points in chart.points.items() if points}
    is_mean = len(logged) > 1 and (look.is_mean or len(logged) > MAX_LINES)
    lines = {_MEAN: _mean(list(chart.means.values()))} if is_mean else logged
    last = list(chart.last.values())
    shown = _mean_of_finite(last) if is_mean else next(iter(last), math.nan)
    smooth = {rank: _smoothed(points, look.smoothing) for rank, points in lines.items()}
    can_be_log = all(y > 0 for points in smooth.values() for _, y in points if math.isfinite(y))
    said = not_finite_note(chart.not_finite) if chart.not_finite else ""
    # Beside the steps, where it moves nothing as it comes.
    note = (
        element("span", shorten(said, 120), class_="na-not-finite", title=shorten(said, 200))
        if said
        else Markup("")
    )
    no_log = "a logarithmic scale needs values above zero"
    head = element(
        "div",
        element(
            "span",
            shorten(name_of(chart.name), 60),
            class_="na-name",
            title=shorten(one_line(chart.name, 90), 120),
        ),
        element("span", "mean", class_="na-muted") if is_mean else "",
        element("b", wording.number(shown)),
        element("span", "linear", class_="na-muted", title=no_log)
        if look.is_log and not can_be_log
        else "",
        element("span", spread(chart.last), class_="na-muted na-spread"),
        class_="na-chart-head",
    )
    if not any(len(points) > 1 for points in smooth.values()):
        # One value is no curve, and its number says it all.
        return element("div", head, note, class_="na-chart")
    is_log = look.is_log and can_be_log
    plot = _plot(smooth, note, is_log=is_log, limit=limit, num=num_stripes)
    return element("div", head, plot, class_="na-chart")


def _mean(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of curves, each of which has points at steps of its own.

    It is that of the curves that are finite there, and has a gap where none is.
    """
    curves = [points for points in curves if points]
    low = min(points[0][0] for points in curves)
    high = max(points[-1][0] for points in curves)
    num = min(_MEAN_POINTS, max(len(points) for points in curves))
    even = {low + (high - low) * index / max(1, num - 1) for index in range(num)}
    gaps = {x for points in curves for x, y in points if not math.isfinite(y)}
    grid = sorted(even | gaps)
    columns = [_at(points, grid) for points in curves]
    return [(x, _mean_of_finite(ys)) for x, *ys in zip(grid, *columns, strict=True)]


def _mean_of_finite(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    # Each divided first: their sum may be more than a float holds.
    return sum(value / len(finite) for value in finite) if finite else math.nan


def _at(points: Sequence[Point], grid: Sequence[float]) -> list[float]:
    """The values of a curve at other steps, on the straight lines between its points."""
    values, index = [], 0
    for x in grid:
        while index + 1 < len(points) and points[index + 1][0] <= x:
            index += 1
        (x0, y0), (x1, y1) = points[index], points[min(index + 1, len(points) - 1)]
        share = (x - x0) / (x1 - x0) if x1 > x0 and x > x0 else 0.0
        values.append(y0 + share * (y1 - y0) if share else y0)
    return values


def _smoothed(points: Sequence[Point], weight: float) -> Sequence[Point]:
    """An exponential mean, corrected for its begin, as TensorBoard's."""
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


def _plot(
    lines: Mapping[int, Sequence[Point]], note: Markup, *, is_log: bool, limit: int, num: int
) -> Markup:
    scale = math.log10 if is_log else float
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points if math.isfinite(y)]
    x_low, x_high, low, high = min(xs), max(xs), min(ys, default=0.0), max(ys, default=0.0)
    # The means of equal numbers differ in their last digits.
    is_flat = math.isclose(low, high, rel_tol=1e-12)
    bottom, top = (scale(low), scale(high)) if ys else (0.0, 0.0)

    def place(point: Point) -> Point:
        across = share_of(point[0], x_low, x_high) * _WIDTH
        up = 0.5 if is_flat else share_of(scale(point[1]), bottom, top)
        return across, _HEIGHT - 4 - up * _ROOM

    paths = {rank: line_path(thin_out(points, limit), place) for rank, points in lines.items()}
    svg = element(
        "svg",
        *(element("path", d=path, stroke=colour_of(rank)) for rank, path in paths.items() if path),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"from {wording.number(low)} to {wording.number(high)}"
        if ys
        else "no value is finite",
    )
    steps = element(
        "div",
        element("span", wording.count(round(x_low))),
        note,
        element("span", f"step {wording.count(round(x_high))}"),
        class_="na-chart-steps",
    )
    # One value needs no two labels.
    if is_flat:
        texts = {"middle": tick(low)} if ys else {}
    else:
        texts = dict(zip(("bottom", "top"), ticks([low, high]), strict=True))
    labels = [
        element("span", texts[side], class_=f"na-tick-{side}")
        for side in ("top", "middle", "bottom")
        if side in texts
    ]
    stripes = element("div", *_stripes(lines, x_low, x_high, num), class_="na-stripes")
    return element("div", svg, *labels, steps, stripes, class_="na-plot")


def _stripes(
    lines: Mapping[int, Sequence[Point]], x_low: float, x_high: float, number: int
) -> list[Markup]:
    """Stripes of one width, each with the values nearest to its middle."""
    stripes = []
    for index in range(number):
        middle = x_low + (x_high - x_low) * (index + 0.5) / number
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
    """The point whose step is nearest to ``x``; points are in the order of their steps."""
    after = bisect_right(points, x, key=itemgetter(0))
    around = points[max(0, after - 1) : after + 1]
    return min(reversed(around), key=lambda point: abs(point[0] - x))
