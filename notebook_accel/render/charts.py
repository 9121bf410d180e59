"""Curves as SVG, without a plotting library: pure functions of numbers.

    curves of a metric --> draw_metrics --> chart --> _draw --+--> live: HTML around an inline SVG
    (one run's, or those of several, one or all in colour)    +--> saved: two images

The SVG of a curve stretches with the page, so axis labels stand outside of it, where they keep
their size. A saved notebook gets images: its sanitisers drop inline SVG and CSS variables but keep
an ``<img>`` with a data URI. An image cannot follow the page's theme, so all colours are mid tones
that read on light and dark.

A metric has one curve, since ``accelerator.log`` records the values of rank 0 alone.
"""

from __future__ import annotations

import base64
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from markupsafe import Markup

from notebook_accel.launch.control.curves import Curve, Point, thin_out
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view.progress import name_of, not_finite_note
from notebook_accel.render.markup import element, shorten

# Mid tones: at least 3:1 against white and against #1e1e1e alike. One a run, or the first alone.
COLOURS = (
    "#2f86d6", "#d9730d", "#2e9e4f", "#d9534f", "#9b6dd7",
    "#a6744a", "#d05fa8", "#17939b", "#8a8f1f", "#c08a00",
)  # fmt: skip
_GREY = "#808080"
_PALE = {"stroke": _GREY, "opacity": 0.7, "stroke_width": 1}
# What the curve of the run that is cloned, or goes on, is called below the pointer.
ORIGINAL = "original"
# The box that stretches, in units of its own: the curve lies between _TOP and _BOTTOM.
_WIDTH, _HEIGHT, _TOP, _BOTTOM = 480, 400, 24, 376
# Points of a curve; more make the message and the notebook larger, not the picture.
_MAX_POINTS = 160
# Places that say a value on hover: of one chart, and of all.
_STRIPES, _MAX_STRIPES = 20, 48
# Curves of a chart; and the points of all of them, of eight bytes each.
_MAX_TOGETHER, _MAX_POINTS_TOGETHER = 200, 900
# Points of several charts in one message: of some runs with their table, and of one or two.
_MAX_POINTS_SHARED, _MAX_POINTS_OF_TWO = 540, 1_000
_GRID = 14, 5
# Up to so many have room for the values of all of them on hover.
_MAX_SAID, _MAX_NAME = 4, 16
# Characters of a curve's label on hover, of which a chart has dozens.
_MAX_LABEL = 30
# Two clicks in a chart write a range of steps into the field above the charts.
_ZOOM = Path(__file__).with_name("zoom.js").read_text().partition("\n\n")[2].replace("\n", "")
_BLOCKS = "▁▂▃▄▅▆▇█"
# Pixels of a saved chart: its height, and the height of the box in that.
_SAVED_HEIGHT, _BOX = 112, 98
# Pixels of the room for labels beside a box: the least, and of each character in the wider font.
_LEFT, _LABEL_CHARACTER = 54, 6.7


# ---- the one renderer ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """Paths in units of their box, its range of steps and values, labels by their position."""

    paths: Sequence[tuple[str, Mapping[str, str | float]]]
    first: float
    last: float
    low: float
    high: float
    labels: Mapping[str, str]

    @property
    def left(self) -> int:
        longest = max(map(len, self.labels.values()), default=0)
        return max(_LEFT, round(longest * _LABEL_CHARACTER) + 8)

    def box(self, *, has_style: bool, **attributes: str | float) -> Markup:
        """Return an ``<svg>`` that stretches with the page while its line keeps its width.

        With ``has_style`` a style sheet says how it is drawn.
        """
        effect = None if has_style else "non-scaling-stroke"
        look: dict[str, str | float] = {
            "fill": "none",
            "stroke_width": 1.6,
            "stroke_linejoin": "round",
            "stroke_linecap": "round",
        }
        lines = [
            element("path", d=path, vector_effect=effect, **look)
            for path, look in self.paths
            if path
        ]
        return element(
            "svg",
            *lines,
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            preserveAspectRatio="none",
            **({} if has_style else look),
            **attributes,
        )


def _draw(
    curves: Sequence[Sequence[Point]], most: int, *, is_log: bool, colours: Sequence[str]
) -> _Drawn:
    """Draw curves on one scale by ``most`` points; what is not finite makes a gap.

    With ``colours`` each curve has its own; else those after the first are pale, and what leaves
    the chart lies on its edge.
    """
    points, *others = curves
    limit = min(_MAX_POINTS, most // (len(curves) if colours else min(len(curves), 2)))
    share = min(limit, max(4, (most - limit) // max(1, len(others))))
    scale = math.log10 if is_log else float
    every = [point for each in curves for point in each]
    first, last = min(every)[0], max(every)[0]
    low, high = _range(every if colours else points, every)
    is_flat = low == high
    bottom, top = (0.0, 0.0) if is_flat else (scale(low), scale(high))

    def place(point: Point) -> str:
        across = _share(point[0], first, last) * _WIDTH
        up = 0.5 if is_flat else _share(scale(min(max(point[1], low), high)), bottom, top)
        return f"{across:.0f},{_BOTTOM - up * (_BOTTOM - _TOP):.0f}"

    def path_of(curve: Sequence[Point], limit: int) -> str:
        path = ""
        for is_finite, piece in groupby(thin_out(curve, limit), lambda p: math.isfinite(p[1])):
            if is_finite:
                places = [*map(place, piece)]
                # A single point becomes a dot.
                path += f"M{' '.join(places)}" if len(places) > 1 else f"M{places[0]}h0"
        return path

    labels = {}
    if any(math.isfinite(y) for _, y in every):
        texts = _labels(low, high)
        labels = {"middle": texts[0]} if is_flat else {"top": texts[1], "bottom": texts[0]}
    further = [path_of(each, share) for each in others]
    looks = [{"stroke": colour} for colour in colours or COLOURS]
    behind = [*zip(further, looks[1:], strict=True)] if colours else [("".join(further), _PALE)]
    return _Drawn(
        # The first one last, which lies above the others.
        paths=[*behind[::-1], (path_of(points, limit), looks[0])],
        first=first,
        last=last,
        low=low,
        high=high,
        labels=labels,
    )


def _range(points: Sequence[Point], every: Sequence[Point]) -> tuple[float, float]:
    """Return the lowest and highest value; of several curves without what is far from most."""
    ys = sorted(y for _, y in every if math.isfinite(y))
    if not ys:
        return 0.0, 0.0
    low, high = ys[len(ys) // 4], ys[3 * len(ys) // 4]
    if len(points) == len(every) or low == high:
        return ys[0], ys[-1]
    # Tukey's outer fences: one training that diverges would flatten all other curves.
    own, room = [y for _, y in points if math.isfinite(y)], 3 * (high - low)
    return min(max(ys[0], low - room), *own), max(min(ys[-1], high + room), *own)


def _labels(low: float, high: float) -> tuple[str, str]:
    texts = "", ""
    for digits in range(4 if max(abs(low), abs(high)) >= 1000 else 3, 18):
        texts = wording.number(low, digits), wording.number(high, digits)
        if texts[0] != texts[1] or low == high:
            break
    return texts


def _share(value: float, low: float, high: float) -> float:
    """Return where ``value`` lies between ``low`` (0) and ``high`` (1); 0 if both are equal."""
    if low == high:
        return 0.0
    if math.isinf(high - low):  # the difference is more than a float holds
        value, low, high = value / 2, low / 2, high / 2
    return (value - low) / (high - low)


# ---- charts: live, and of a saved notebook --------------------------------------------------


def draw_metrics(
    metrics: Mapping[str, Mapping[str, Curve]],
    *,
    num_places: int = 0,
    is_live: bool = False,
    **how: Any,
) -> Markup:
    """Return charts of metrics, each with its curves by what these are called.

    The first one is in colour. What is called "" is not named, and the others are for comparison.

    Args:
        num_places: the least number of places of live charts, so that all pages are equally high.
        is_live: a style sheet, ``charts.css``, says how they are drawn, and all are one message.
        how: as for :func:`chart`.
    """
    how = {"num_charts": len(metrics) if is_live else 1, "is_live": is_live, **how}
    parts = [_plot(name, curves, **how) for name, curves in metrics.items()]
    if is_live:
        parts += [[]] * (num_places - len(parts))
        plots = [element("div", *part, class_="na-chart") for part in parts]
        columns = {1: 2, 5: 3, 6: 3}.get(len(plots), min(4, len(plots)))
        style = f"--columns:{columns}"
        return element("div", *plots, class_="na-charts", style=style, onmousedown=_ZOOM)
    # As wide as in the live panel: two or three in a row, and on a narrow page one.
    size = f"flex:1 1 {330 if len(metrics) == 4 else 280}px;max-width:480px"
    plots = [element("div", *part, style=size) for part in parts]
    row = "display:flex;flex-wrap:wrap;gap:8px 24px;margin:8px 0 2px"
    return element("div", *plots, style=row)


def _plot(
    name: str,
    curves: Mapping[str, Curve],
    *,
    colours: Mapping[str, str] | None = None,
    is_log: bool = False,
    **how: Any,
) -> list[Markup]:
    points = {called: curve.points() for called, curve in curves.items()}
    first, curve = next(iter(curves.items()))
    own = points[first]
    title = shorten(one_line(name, 90), 120)
    head = [element("b", name_of(name), class_="na-name", title=title)]
    # Not its last point: of several values at one step, that is the highest.
    last = wording.number(curve.last)
    head += [] if colours else [element("span", f"\N{NO-BREAK SPACE} {last}")]
    if is_log and any(-math.inf < y <= 0 for each in points.values() for _, y in each):
        is_log, about = False, "a logarithmic scale needs values above zero"
        head.append(element("span", "\N{NO-BREAK SPACE} linear", title=about))
    notes: list[Markup] = []
    for called, each in curves.items():
        note, style = not_finite_note(each), "font-size:11px;color:#b7791f"
        if note and first:
            notes.append(element("div", f"{called}: {note}", style=style))
        elif note and not called:
            # Beside the value: below the chart it would move all that follows as it comes.
            head.append(element("span", f"\N{NO-BREAK SPACE} {note}", title=note, style=style))
    parts = [element("div", *head, class_="na-chart-head")]
    if first and len(curves) > 1 and not colours:
        about = f"in colour: {first}"
        parts.append(element("div", about, style="opacity:.65;font-size:11px"))
    # Of a range of steps there may be no value.
    if own and max(map(len, points.values())) > 1:
        begin, step = wording.number(own[0][1]), wording.count(own[-1][0])
        alt = f"{name_of(name)}: {begin} → {last} at step {step}"
        marks = curve.marks
        parts.append(chart(points, alt=alt, colours=colours, is_log=is_log, marks=marks, **how))
    return [*parts, *notes]


def chart(
    curves: Mapping[str, Sequence[Point]],
    *,
    alt: str,
    colours: Mapping[str, str] | None = None,
    num_charts: int = 1,
    is_log: bool = False,
    is_live: bool = False,
    marks: Sequence[tuple[float, str, float]] = (),
) -> Markup:
    """Return a chart: an inline SVG if it is live, else two images, of the curves and of labels.

    Args:
        curves: points, at least one, by what their run is called on hover; "" for a single run.
        colours: those of the curves; None: those after the first are pale.
        num_charts: so many share the bytes of a message.
        is_live: it is drawn anew all the time, at which the browser's own ``title`` vanishes, and
            an image would blink.
        marks: changes of knobs, as (step, name, value).
    """
    curves = dict(islice(curves.items(), _MAX_TOGETHER // num_charts))
    most = _MAX_POINTS_SHARED if len(curves) > 2 else _MAX_POINTS_OF_TWO
    most = _MAX_POINTS_TOGETHER if num_charts == 1 else most // num_charts
    own = [colours[name] for name in curves] if colours else ()
    drawn = _draw([*curves.values()], most, is_log=is_log, colours=own)
    columns, rows = min(_STRIPES, _MAX_STRIPES // num_charts), 1
    if len(curves) > _MAX_SAID:
        columns, rows = _GRID if num_charts == 1 else (4, 3)
    texts = _texts(curves, drawn, columns, rows)
    # A little less than its share, so that rounding breaks no line.
    share, left = f"{99.9 / columns:.2f}%", f"{drawn.left}px"
    ends = [wording.count(drawn.first)] if drawn.first != drawn.last else []
    ends.append(f"step {wording.count(drawn.last)}")
    changes = {}
    for step, name, value in marks:
        text = f"step {wording.count(step)}: {shorten(name, 40)} = {wording.number(value)}"
        if drawn.first <= step <= drawn.last:
            changes[text] = f"{_share(step, drawn.first, drawn.last):.1%}"
    if is_live:
        hover = [element("i", data_said=text) for text in texts]
        hover += [element("u", data_said=text, style=f"left:{x}") for text, x in changes.items()]
        steps = f"{drawn.first:.0f} {drawn.last:.0f}"
        return element(
            "div",
            drawn.box(has_style=True, role="img", aria_label=alt),
            *(element("span", text, class_=f"na-tick-{at}") for at, text in drawn.labels.items()),
            element("div", *(element("span", end) for end in ends), class_="na-chart-steps"),
            element("div", *hover, class_="na-stripes", data_steps=steps),
            class_="na-plot",
            style=f"--left:{left};--w:{share}",
        )
    # Over the image: what lies inside of one hears no mouse.
    hover = [element("span", title=text, style=f"flex:1 0 {share}") for text in texts]
    at_mark = "position:absolute;top:0;bottom:0;width:7px;margin-left:-3px"
    hover += [
        element("span", title=text, style=f"{at_mark};left:{x}") for text, x in changes.items()
    ]
    heights = {"top": _TOP * _BOX / _HEIGHT, "middle": _BOX / 2, "bottom": _BOTTOM * _BOX / _HEIGHT}
    lines = (element("line", x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}") for y in heights.values())
    grid = element("g", *lines, stroke=_GREY, opacity=0.35)
    ends_y = {"y1": f"{heights['top']:.1f}", "y2": f"{heights['bottom']:.1f}", "stroke": "#b7791f"}
    marked = [element("line", x1=x, x2=x, **ends_y) for x in changes.values()]
    labels = [
        _text(text, drawn.left - 6, heights[at] + 4, "end") for at, text in drawn.labels.items()
    ]
    places = [("0", "start"), ("100%", "end")] if len(ends) > 1 else [("50%", "middle")]
    foot = zip(ends, places, strict=True)
    captions = [_text(end, x, _SAVED_HEIGHT - 5, at) for end, (x, at) in foot]
    box = drawn.box(has_style=False, width="100%", height=_BOX)
    place = f"position:absolute;top:0;left:{left};right:0;height:{_BOX}px"
    return element(
        "div",
        _picture(labels, alt="", width=drawn.left, style=f"width:{left}"),
        _picture(
            [grid, *marked, box, *captions],
            alt=alt,
            width=_WIDTH,
            style=f"width:calc(100% - {left})",
        ),
        element("div", *hover, style=f"{place};display:flex;flex-wrap:wrap"),
        style="position:relative;white-space:nowrap;line-height:0",
    )


def _picture(parts: Sequence[Markup], *, alt: str, width: int, style: str) -> Markup:
    svg = element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        width="100%",
        height=_SAVED_HEIGHT,
        fill=_GREY,
        font_size=11,
        font_family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif",
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
    return element("text", text, x=x, y=round(y), text_anchor=anchor)


def sparkline(points: Sequence[Point], width: int = 10) -> str:
    """Return a curve as ``width`` characters at most, for a cell of a table and for text."""
    ys = [y for _, y in points if math.isfinite(y)]
    if len(ys) < 2:
        return ""
    low, high = min(ys), max(ys)
    num = min(width, len(ys))
    chosen = (ys[index * (len(ys) - 1) // (num - 1)] for index in range(num))
    levels = (round(_share(y, low, high) * (len(_BLOCKS) - 1)) for y in chosen)
    return "".join(_BLOCKS[level] for level in levels)


def smoothed(points: Sequence[Point], weight: float) -> Sequence[Point]:
    """Return an exponential moving mean, bias-corrected; values that are not finite stay."""
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


def _texts(
    curves: Mapping[str, Sequence[Point]], drawn: _Drawn, columns: int, rows: int
) -> list[str]:
    """Return what is below the pointer in each place of a grid, from the top, row by row.

    In a single row it is a step with the values of all curves, in several the nearest curve, since
    one is too thin to point at.
    """

    def nearest(curve: Sequence[Point], x: float) -> Point:
        after = bisect_right(curve, x, key=lambda point: point[0])
        around = curve[max(0, after - 1) : after + 1]
        return min(reversed(around), key=lambda point: abs(point[0] - x))

    width = drawn.last - drawn.first
    places = [drawn.first + width * (column + 0.5) / columns for column in range(columns)]
    there = [
        {name: nearest(each, x) for name, each in curves.items() if each[0][0] <= x <= each[-1][0]}
        for x in places
    ]
    texts = []
    for seen in there if rows == 1 else ():
        values = [
            f"{one_line(name, _MAX_NAME)} {wording.number(y)}" for name, (_, y) in seen.items()
        ]
        step = next((f"step {wording.count(round(step))}: " for step, _ in seen.values()), "")
        texts.append(step + ", ".join(value.strip() for value in values))
    for row in range(rows) if rows > 1 else ():
        up = 1 - (row + 0.5) / rows
        for seen in there:
            far = {
                name: abs(_share(y, drawn.low, drawn.high) - up)
                for name, (_, y) in seen.items()
                if math.isfinite(y)
            }
            name = min(far, key=far.__getitem__, default="")
            # Labels differ at their ends; the legend has them whole.
            label = name if len(name) <= _MAX_LABEL else f"{name[:12]}…{name[-_MAX_LABEL + 13 :]}"
            texts.append(f"{label}: {wording.number(seen[name][1])}" if name else "")
    return texts
