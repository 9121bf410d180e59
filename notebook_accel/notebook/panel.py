"""The live panel as HTML: a pure function of the run's state.

It is drawn five times a second, so it stays under :data:`MAX_BYTES` whatever the run prints and
however many ranks it has: rows and lines beyond that are folded, and the fold says of what.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from notebook_accel.launch.view import wording
from notebook_accel.launch.view.outline import (
    Advance,
    advance,
    last_values,
    memory_of,
    spread,
)
from notebook_accel.launch.view.summary import elapsed, folded, size, worth_a_row
from notebook_accel.notebook import plot
from notebook_accel.notebook.markup import Html, cut, element, join, weight

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


def render_panel(state: RunState, details: Details) -> Html:
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
        if weight(body) <= MAX_BYTES:
            return body
    return element("div", *head[:2], _error(state, 600), class_="na")


def _title(state: RunState, now: float) -> Html:
    return element(
        "div",
        element("span", class_=f"na-dot na-{state.status}"),
        element("b", cut(state.name, 60)),
        element("span", state.status, class_=f"na-status na-{state.status}"),
        element("span", size(state), class_="na-muted"),
        element("span", wording.clock(elapsed(state, now)), class_="na-muted na-clock"),
        class_="na-title",
    )


# ---- ranks ---------------------------------------------------------------------------------


def _ranks(state: RunState, details: Details) -> Html:
    shown = worth_a_row(state.ranks)
    rows = [_row(rank, details.paces.get(rank.rank)) for rank in shown]
    table = element("table", _HEADER, element("tbody", *rows), class_="na-ranks")
    rest = folded(state.ranks, shown)
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


def _row(rank: RankState, pace: float | None) -> Html:
    far = advance(rank, pace=pace)
    return element(
        "tr",
        element("td", str(rank.rank), class_="na-c-rank"),
        element("td", _how(rank), class_=f"na-c-state na-{rank.status}"),
        element("td", cut(far.label, 60), class_="na-c-label", title=cut(far.label, 90) or None),
        element("td", _bar(rank, far), class_="na-c-bar"),
        element("td", far.count, class_="na-c-count"),
        element("td", far.rate, class_="na-c-rate"),
        element("td", far.remaining, class_="na-c-left"),
        element("td", memory_of(rank), class_="na-c-memory"),
    )


def _how(rank: RankState) -> str:
    return "done" if rank.status == "succeeded" else rank.status


def _bar(rank: RankState, far: Advance) -> Html:
    # A bar without a value would animate anew at every update: an empty one stands still.
    value = round(far.fraction or 0.0, 3)
    return element(
        "progress",
        max=1,
        value=value,
        aria_label=cut(f"rank {rank.rank}: {far.text}", 80),
        class_=f"na-{rank.status}",
    )


def _strip(state: RunState) -> Html:
    """One small cell a rank, as full as the rank is far."""
    cells = [_cell(rank) for rank in state.ranks]
    return element("div", *cells, class_="na-strip", aria_hidden="true")


def _cell(rank: RankState) -> Html:
    fraction = advance(rank).fraction
    full = "" if fraction is None else f"--f:{fraction:.0%}"
    return element("i", class_=f"na-{rank.status}", style=full or None, title=str(rank.rank))


# ---- metrics, notices, error ---------------------------------------------------------------


def _metrics(state: RunState, curves: Mapping[str, Sequence[float]]) -> Html:
    values = last_values(state)
    if not values:
        return Html("")
    cards = [
        _metric(name, by_rank, curves.get(name, ()))
        for name, by_rank in list(values.items())[:_MAX_METRICS]
    ]
    if len(values) > _MAX_METRICS:
        rest = f"… and {len(values) - _MAX_METRICS} more"
        cards.append(element("span", rest, class_="na-muted"))
    return element("div", *cards, class_="na-metrics")


def _metric(name: str, by_rank: Mapping[int, float], curve: Sequence[float]) -> Html:
    return element(
        "div",
        element("span", cut(name, 32), class_="na-muted"),
        element("b", wording.number(next(iter(by_rank.values())))),
        plot.sparkline(curve),
        element("span", spread(by_rank), class_="na-muted na-spread"),
        class_="na-metric",
    )


def _notices(state: RunState) -> Html:
    lines = [element("div", cut(text, 300)) for text in state.notices[-4:]]
    return element("div", *lines, class_="na-notices") if lines else Html("")


def _error(state: RunState, limit: int = 3000) -> Html:
    if not state.error:
        return Html("")
    return element("pre", cut(state.error, limit), class_="na-error", role="alert")


# ---- output --------------------------------------------------------------------------------


def _output(state: RunState, chosen: int | None, lines: int, width: int) -> Html:
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


def _of_all(state: RunState, lines: int, width: int) -> list[Html]:
    with_output = [rank for rank in state.ranks if rank.tail]
    each = max(2, lines // max(1, len(with_output)))
    return [_block(rank, each, width) for rank in with_output[:lines]]


def _block(rank: RankState, lines: int, width: int) -> Html:
    """The last lines of one rank, each with its number beside it."""
    if not rank.tail:
        return Html("")
    text = "\n".join(cut(line, width) for line in rank.tail[-lines:])
    return element(
        "div",
        element("span", str(rank.rank), class_="na-tag"),
        # A reversed column starts scrolled to its end, where the newest line is.
        element("div", element("pre", text)),
        class_="na-block",
    )
