"""The live panel as HTML, its log aside: a pure function of the run's state.

It is drawn five times a second, so it stays under :data:`MAX_BYTES` whatever the run does and
however many ranks it has: what does not fit is folded, and the fold says of what.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from notebook_accel.launch.control.terminal_text import one_line
from notebook_accel.launch.view import wording
from notebook_accel.launch.view.progress import (
    ProgressLine,
    last_values,
    memory_of,
    name_of,
    progress_lines,
    spread,
)
from notebook_accel.launch.view.summary import (
    condition,
    elapsed,
    hang_line,
    hidden_ranks,
    live_condition,
    num_ranks,
    ranks_with_row,
)
from notebook_accel.notebook import charts
from notebook_accel.notebook.markup import Markup, element, join, message_bytes, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_accel.launch.control.state import RankState, RunState

__all__ = ["MAX_BYTES", "Details", "render_panel"]

MAX_BYTES = 18_000
_MAX_METRICS = 12
_MAX_STACKS = 6
# Nested bars get rows of their own while there are no more rows than this in all.
_MAX_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Details:
    """What the panel shows beside the run's state.

    Attributes:
        now: wall time, seconds.
        throughputs: items a second of ranks that draw no bar.
        curves: newest values of each metric, oldest first.
    """

    now: float
    throughputs: Mapping[int, float | None] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)


def render_panel(state: RunState, details: Details) -> Markup:
    """The panel, in as much detail as fits into :data:`MAX_BYTES`."""
    for num_metrics, text_bytes in ((_MAX_METRICS, 60), (4, 30), (0, 12)):
        body = element(
            "div",
            _title(state, details.now),
            _hang(state, text_bytes),
            _ranks(state, details, text_bytes),
            _metrics(state, details.curves, num_metrics),
            _notices(state, 5 * text_bytes),
            class_="na",
        )
        if message_bytes(body) <= MAX_BYTES:
            break
    return body


def _title(state: RunState, now: float) -> Markup:
    return element(
        "div",
        element("span", class_=f"na-dot na-{state.status}"),
        element("b", shorten(state.name, 60)),
        element("span", state.status, class_=f"na-status na-{state.status}"),
        element("span", num_ranks(state), class_="na-muted"),
        element("span", wording.clock(elapsed(state, now)), class_="na-muted na-clock"),
        class_="na-title",
    )


# ---- ranks ---------------------------------------------------------------------------------

_COLUMNS = (
    ("rank", "rank"),
    ("state", "state"),
    ("label", ""),
    ("bar", "progress"),
    ("count", ""),
    ("rate", "rate"),
    ("left", "left"),
    ("memory", "memory"),
)
_HEADER = element(
    "thead",
    element("tr", *(element("th", t, scope="col", class_=f"na-c-{c}") for c, t in _COLUMNS)),
)


def _ranks(state: RunState, details: Details, text_bytes: int) -> Markup:
    shown = ranks_with_row(state.ranks)
    lines = {
        rank.rank: progress_lines(rank, throughput=details.throughputs.get(rank.rank))
        for rank in shown
    }
    has_room = sum(map(len, lines.values())) <= max(_MAX_ROWS, len(shown))
    rows: list[Markup] = []
    for rank in shown:
        first, *inner = lines[rank.rank]
        if has_room:
            rows.append(_row(state, rank, first, [], text_bytes))
            rows += [_inner_row(rank, line, text_bytes) for line in inner]
        else:
            rows.append(_row(state, rank, first, inner, text_bytes))
    parts = [element("table", _HEADER, element("tbody", *rows), class_="na-ranks")]
    rest = hidden_ranks(state.ranks, shown)
    if rest:
        cells = [_strip_cell(rank) for rank in state.ranks]
        parts.append(element("div", *cells, class_="na-strip", aria_hidden="true"))
        parts.append(element("div", rest, class_="na-fold na-muted"))
    return join(parts)


def _row(
    state: RunState,
    rank: RankState,
    line: ProgressLine,
    inner: Sequence[ProgressLine],
    text_bytes: int,
) -> Markup:
    """The row of a rank: its outermost bar, and thin bars below it for ``inner`` ones."""
    status = live_condition(rank, state)
    bars = [_bar(rank, line, "") for line in (line, *inner)]
    return element(
        "tr",
        element("td", str(rank.rank), class_="na-c-rank"),
        element(
            "td",
            {"succeeded": "done"}.get(status, status),
            class_=f"na-c-state {_class_of(status)}",
        ),
        _label(line, text_bytes),
        element("td", *bars, class_="na-c-bar"),
        element("td", line.count, class_="na-c-count"),
        element("td", line.rate, class_="na-c-rate"),
        element("td", line.remaining, class_="na-c-left"),
        element("td", memory_of(rank), class_="na-c-memory"),
    )


def _inner_row(rank: RankState, line: ProgressLine, text_bytes: int) -> Markup:
    """A row for a bar inside of another one."""
    return element(
        "tr",
        element("td", colspan=2),
        _label(line, text_bytes),
        element("td", _bar(rank, line, "na-thin "), class_="na-c-bar"),
        element("td", line.count, class_="na-c-count"),
        element("td", line.rate, class_="na-c-rate"),
        # A cell for each column: a narrow page hides some of them by their classes.
        element("td", class_="na-c-left"),
        element("td", class_="na-c-memory"),
        class_="na-inner",
    )


def _label(line: ProgressLine, text_bytes: int) -> Markup:
    title = shorten(line.label, 90) if len(line.label) > 18 else None
    return element("td", shorten(line.label, text_bytes), class_="na-c-label", title=title)


def _bar(rank: RankState, line: ProgressLine, kind: str) -> Markup:
    return element(
        "progress",
        max=1,
        # A bar without a value would animate anew at every update: an empty one stands still.
        value=round(line.fraction or 0.0, 3),
        aria_label=shorten(f"rank {rank.rank}: {line.text}", 60),
        class_=f"{kind}{_class_of(condition(rank))}",
    )


def _strip_cell(rank: RankState) -> Markup:
    """One of the small cells that stand for all ranks, as full as its rank is far."""
    fraction = progress_lines(rank)[0].fraction
    style = None if fraction is None else f"--f:{fraction:.0%}"
    return element("i", class_=_class_of(condition(rank)), style=style, title=str(rank.rank))


def _class_of(status: str) -> str:
    """The class by which the style sheet colours a status: ``na-lost-peer``."""
    return f"na-{status.replace(' ', '-')}"


# ---- who waits for whom ---------------------------------------------------------------------


def _hang(state: RunState, text_bytes: int) -> Markup:
    """Who waits for whom, and below a fold the stacks of those that stand alike."""
    hang = state.hang
    if hang is None:
        return Markup("")
    stacks = [
        element(
            "div",
            element("b", wording.rank_list(ranks)),
            element("pre", shorten(stack.strip("\n"), 20 * text_bytes)),
        )
        for ranks, stack in hang.stacks[:_MAX_STACKS]
    ]
    return element(
        "div",
        element("div", shorten(hang_line(state), 800)),
        element("details", element("summary", "stacks"), *stacks) if text_bytes > 12 else "",
        class_="na-hang" if hang.is_certain else "na-hang na-waiting",
        role="status",
    )


# ---- metrics and notices -------------------------------------------------------------------


def _metrics(state: RunState, curves: Mapping[str, Sequence[float]], limit: int) -> Markup:
    values = last_values(state)
    if not values:
        return Markup("")
    cells = [
        element(
            "div",
            element(
                "span",
                shorten(name_of(name), 40),
                class_="na-name na-muted",
                title=shorten(one_line(name, 90), 90),
            ),
            element("b", wording.number(next(iter(by_rank.values())))),
            charts.sparkline(curves.get(name, ())),
            element("span", spread(by_rank), class_="na-muted na-spread"),
            class_="na-metric",
        )
        for name, by_rank in list(values.items())[:limit]
    ]
    if len(values) > limit:
        rest = f"… and {len(values) - limit} more in run.metrics"
        cells.append(element("div", rest, class_="na-metric na-muted"))
    return element("div", *cells, class_="na-metrics")


def _notices(state: RunState, text_bytes: int) -> Markup:
    lines = [element("div", shorten(text, text_bytes)) for text in state.notices[-4:]]
    return element("div", *lines, class_="na-notices") if lines else Markup("")
