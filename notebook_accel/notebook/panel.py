"""The live panel as HTML: a pure function of the run's state.

It is drawn five times a second, so it stays under :data:`MAX_BYTES` whatever the run prints and
however many ranks it has: rows and lines beyond that are folded, and the fold says of what.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from notebook_accel.launch.view import wording
from notebook_accel.launch.view.progress import (
    ProgressLine,
    last_values,
    memory_of,
    progress_lines,
    spread,
)
from notebook_accel.launch.view.summary import (
    condition,
    elapsed,
    hidden_ranks,
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
_MAX_METRICS = 8


@dataclass(frozen=True, kw_only=True)
class Details:
    """What the panel shows beside the run's state.

    Attributes:
        now: wall time, seconds.
        paces: items a second of ranks that draw no bar.
        chosen: the one rank whose output is shown, None for all.
        curves: newest values of each metric, oldest first.
    """

    now: float
    paces: Mapping[int, float | None] = field(default_factory=dict)
    chosen: int | None = None
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)


def render_panel(state: RunState, details: Details) -> Markup:
    """The panel, in as much detail as fits."""
    head = [
        _title(state, details.now),
        _ranks(state, details),
        _metrics(state, details.curves),
        _notices(state),
        _error(state),
    ]
    for lines, width in ((40, 400), (12, 200), (6, 120), (2, 80)):
        body = element("div", *head, _output(state, details.chosen, lines, width), class_="na")
        if message_bytes(body) <= MAX_BYTES:
            return body
    return element("div", *head[:2], _error(state, 600), class_="na")


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


def _ranks(state: RunState, details: Details) -> Markup:
    shown = ranks_with_row(state.ranks)
    rows = [_rows(rank, details.paces.get(rank.rank)) for rank in shown]
    table = element("table", _HEADER, element("tbody", *rows), class_="na-ranks")
    rest = hidden_ranks(state.ranks, shown)
    if not rest:
        return table
    return join([table, _strip(state), element("div", rest, class_="na-fold na-muted")])


_HEADER = element(
    "thead",
    element(
        "tr",
        *(
            element("th", text, scope="col", class_=f"na-c-{name}")
            for name, text in (
                ("rank", "rank"),
                ("state", "state"),
                ("label", ""),
                ("bar", "progress"),
                ("count", ""),
                ("rate", "rate"),
                ("left", "left"),
                ("memory", "memory"),
            )
        ),
    ),
)


def _rows(rank: RankState, throughput: float | None) -> Markup:
    """One row a bar; the first one also says how its rank is."""
    lines = progress_lines(rank, throughput=throughput)
    return join(_row(rank, line, is_first=line is lines[0]) for line in lines)


def _row(rank: RankState, line: ProgressLine, *, is_first: bool) -> Markup:
    status = condition(rank)
    # A bar without a value would animate anew at every update: an empty one stands still.
    bar = element(
        "progress",
        max=1,
        value=round(line.fraction or 0.0, 3),
        aria_label=shorten(f"rank {rank.rank}: {line.text}", 80),
        class_=_class_of(status),
    )
    label = shorten(line.label, 60)
    title = shorten(line.label, 90) or None
    return element(
        "tr",
        element("td", str(rank.rank) if is_first else "", class_="na-c-rank"),
        element(
            "td",
            {"succeeded": "done"}.get(status, status) if is_first else "",
            class_=f"na-c-state {_class_of(status)}",
        ),
        element("td", label, class_="na-c-label", title=title),
        element("td", bar, class_="na-c-bar"),
        element("td", line.count, class_="na-c-count"),
        element("td", line.rate, class_="na-c-rate"),
        element("td", line.remaining, class_="na-c-left"),
        element("td", memory_of(rank) if is_first else "", class_="na-c-memory"),
        class_=None if is_first else "na-inner",
    )


def _class_of(status: str) -> str:
    """The class by which the style sheet colours a status: ``na-lost-peer``."""
    return f"na-{status.replace(' ', '-')}"


def _strip(state: RunState) -> Markup:
    """One small cell a rank, as full as the rank is far."""
    cells = [_cell(rank) for rank in state.ranks]
    return element("div", *cells, class_="na-strip", aria_hidden="true")


def _cell(rank: RankState) -> Markup:
    fraction = progress_lines(rank)[0].fraction
    full = "" if fraction is None else f"--f:{fraction:.0%}"
    return element("i", class_=f"na-{rank.status}", style=full or None, title=str(rank.rank))


# ---- metrics, notices, error ---------------------------------------------------------------


def _metrics(state: RunState, curves: Mapping[str, Sequence[float]]) -> Markup:
    values = last_values(state)
    if not values:
        return Markup("")
    cards = [
        _metric(name, by_rank, curves.get(name, ()))
        for name, by_rank in list(values.items())[:_MAX_METRICS]
    ]
    if len(values) > _MAX_METRICS:
        rest = f"… and {len(values) - _MAX_METRICS} more"
        cards.append(element("span", rest, class_="na-muted"))
    return element("div", *cards, class_="na-metrics")


def _metric(name: str, by_rank: Mapping[int, float], curve: Sequence[float]) -> Markup:
    return element(
        "div",
        element("span", shorten(name, 32), class_="na-muted"),
        element("b", wording.number(next(iter(by_rank.values())))),
        charts.sparkline(curve),
        element("span", spread(by_rank), class_="na-muted na-spread"),
        class_="na-metric",
    )


def _notices(state: RunState) -> Markup:
    lines = [element("div", shorten(text, 300)) for text in state.notices[-4:]]
    return element("div", *lines, class_="na-notices") if lines else Markup("")


def _error(state: RunState, limit: int = 3000) -> Markup:
    if not state.error:
        return Markup("")
    return element("pre", shorten(state.error, limit), class_="na-error", role="alert")


# ---- output --------------------------------------------------------------------------------


def _output(state: RunState, chosen: int | None, lines: int, width: int) -> Markup:
    if chosen is None:
        blocks = _of_all(state, lines, width)
    else:
        blocks = [_block(state.ranks[chosen], 2 * lines, width)]
    if not any(blocks):
        blocks = [element("div", "no output yet", class_="na-muted na-none")]
    return join(
        [
            element("div", "output", class_="na-log-title na-muted"),
            element("div", *blocks, class_="na-log", role="log", aria_label="output"),
        ]
    )


def _of_all(state: RunState, lines: int, width: int) -> list[Markup]:
    with_output = [rank for rank in state.ranks if rank.tail]
    each = max(2, lines // max(1, len(with_output)))
    return [_block(rank, each, width) for rank in with_output[:lines]]


def _block(rank: RankState, lines: int, width: int) -> Markup:
    """The last lines of one rank, each with its number beside it."""
    if not rank.tail:
        return Markup("")
    text = "\n".join(shorten(line, width) for line in rank.tail[-lines:])
    return element(
        "div",
        element("span", str(rank.rank), class_="na-tag"),
        # A reversed column starts scrolled to its end, where the newest line is.
        element("div", element("pre", text)),
        class_="na-block",
    )
