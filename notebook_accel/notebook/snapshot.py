"""The summary that a saved notebook keeps: a pure function of the run's state and its metrics.

It is shown where nobody runs code: JupyterLab without a kernel and untrusted, nbconvert,
GitHub. Their sanitisers drop inline SVG, style sheets, variables and ids, and some drop style
attributes as well. So it is plain tables, ``<details>`` and images, readable without any style,
and what style it has is inline, in tones that read on light and dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.control.plotting import metric_curves
from notebook_accel.launch.view import summary, wording
from notebook_accel.launch.view.progress import spread
from notebook_accel.notebook import charts
from notebook_accel.notebook.markup import Markup, element, join, message_bytes, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_accel.launch.control.plotting import Curves, Point
    from notebook_accel.launch.control.state import RankState, RunState

__all__ = ["MAX_BYTES", "Snapshot", "render_line", "render_snapshot"]

MAX_BYTES = 120_000
_MAX_NOTICES = 8
_MAX_PLOTS = 6
_MAX_CURVES = 8

_LINE = "1px solid rgba(128,128,128,.3)"
_MONO = "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
_FRAME = (
    f"border:{_LINE};border-radius:8px;padding:10px 14px;margin:2px 0;max-width:1000px;"
    "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px;"
    "line-height:1.5"
)
_CELL = f"text-align:left;padding:3px 22px 3px 0;border:none;border-top:{_LINE};font-size:13px"
_NARROW = f"{_CELL};white-space:nowrap;width:1%"
_HEAD = "text-align:left;padding:0 22px 3px 0;border:none;font-weight:normal;opacity:.65"
_TABLE = "border:none;border-collapse:collapse;margin:8px 0 4px;width:100%;font-size:13px"
_TEXT = (
    f"{_MONO};white-space:pre-wrap;word-break:break-word;overflow:auto;max-height:320px;"
    "margin:4px 0;padding:6px 10px;background:rgba(128,128,128,.1);border-radius:4px;"
    "line-height:1.4;text-align:left"
)
_MUTED = "opacity:.65"
_COLOURS = {"succeeded": "#3a9a55", "failed": "#cf4f57", "stopped": "#b7791f"}


@dataclass(frozen=True)
class Snapshot:
    """The summary for pages and for text."""

    html: Markup
    text: str

    @property
    def bundle(self) -> dict[str, str]:
        """The summary by MIME type."""
        return {"text/html": str(self.html), "text/plain": self.text}


def render_line(text: str) -> Snapshot:
    """One line, framed as the summary is, for a run that is not there yet."""
    line = element("span", text, style=_MUTED)
    return Snapshot(html=element("div", line, style=_FRAME), text=text)


def render_snapshot(
    state: RunState, metrics: Iterable[Mapping[str, Any]] = (), *, now: float | None = None
) -> Snapshot:
    """The summary of a run.

    Args:
        state: the run's state.
        metrics: every value given to ``accelerator.log``, as ``run.metrics`` has them.
        now: wall time in seconds, for a run that still goes on.
    """
    now = state.started if now is None else now
    return Snapshot(_html(state, metric_curves(metrics), now), _text(state, now))


# ---- metrics -------------------------------------------------------------------------------


def _plots(curves: Curves) -> Markup:
    if not curves:
        return Markup("")
    names = list(curves)
    cards = [_card(name, curves[name]) for name in names[:_MAX_PLOTS]]
    row = element("div", *cards, style="display:flex;flex-wrap:wrap;gap:6px 22px;margin:10px 0 2px")
    hidden = names[_MAX_PLOTS : _MAX_PLOTS + 20]
    return join(
        [
            row,
            element(
                "div", f"… and {', '.join(shorten(name, 40) for name in hidden)}", style=_MUTED
            ),
        ]
        if hidden
        else [row]
    )


def _card(name: str, by_rank: Mapping[int, Sequence[Point]]) -> Markup:
    shown = dict(list(by_rank.items())[:_MAX_CURVES])
    title = [element("b", shorten(name, 40)), f"\N{NO-BREAK SPACE} {_last(by_rank)}"]
    parts = [element("div", *title), *_key(shown)]
    if any(len(points) > 1 for points in shown.values()):
        labelled = {str(rank): points for rank, points in shown.items()}
        parts.append(charts.chart(labelled, alt=_alt(name, by_rank)))
    return element("div", *parts)


def _key(by_rank: Mapping[int, object]) -> list[Markup]:
    """Which rank has which colour, where there is more than one curve."""
    if len(by_rank) < 2:
        return []
    marks = [
        element("span", "● ", element("span", f"rank {rank} ", style=_MUTED), style=_tone(index))
        for index, rank in enumerate(by_rank)
    ]
    return [element("div", *marks, style="font-size:11px")]


def _tone(index: int) -> str:
    return f"color:{charts.COLOURS[index % len(charts.COLOURS)]}"


def _last(by_rank: Mapping[int, Sequence[Point]]) -> str:
    values = {rank: points[-1][1] for rank, points in by_rank.items()}
    return spread(values) or wording.number(next(iter(values.values())))


def _alt(name: str, by_rank: Mapping[int, Sequence[Point]]) -> str:
    """The curve in words: where it began, where it ended."""
    points = next(iter(by_rank.values()))
    first, last = (wording.number(point[1]) for point in (points[0], points[-1]))
    return f"{name}: {first} → {last} at step {wording.number(points[-1][0])}"


# ---- html ----------------------------------------------------------------------------------


def _html(state: RunState, curves: Curves, now: float) -> Markup:
    """The summary, with as many lines of output as fit."""
    seconds = summary.elapsed(state, now)
    head = [_title(state, seconds), _table(state, seconds), _notices(state), _failure(state)]
    plots = _plots(curves)
    for ranks, lines in ((8, 20), (8, 6), (2, 4), (0, 0)):
        body = element("div", *head, plots, _output(state, ranks, lines), style=_FRAME)
        if message_bytes(body) <= MAX_BYTES:
            break
    return body


def _title(state: RunState, seconds: float) -> Markup:
    colour = f"color:{_COLOURS.get(state.status, '#2f86d6')}"
    return element(
        "div",
        element("b", shorten(state.name, 60), style="font-size:14px"),
        " ",
        element("b", f"{summary.SIGNS.get(state.status, '●')} {state.status}", style=colour),
        " ",
        element("span", f"{summary.num_ranks(state)}, {wording.span(seconds)}", style=_MUTED),
    )


def _table(state: RunState, seconds: float) -> Markup:
    shown = summary.ranks_with_row(state.ranks)
    rows = [_row(summary.rank_facts(rank, seconds), rank.status) for rank in shown]
    head = element("tr", *(element("th", name, style=_HEAD) for name in summary.COLUMNS))
    table = element("table", element("thead", head), element("tbody", *rows), style=_TABLE)
    return join([table, element("div", summary.hidden_ranks(state.ranks, shown), style=_MUTED)])


def _row(facts: Sequence[str], status: str) -> Markup:
    colour = _COLOURS.get(status)
    styles = [_NARROW, f"{_NARROW};color:{colour}" if colour else _NARROW, _CELL, _NARROW, _NARROW]
    cells = [element("td", fact, style=style) for fact, style in zip(facts, styles, strict=True)]
    return element("tr", *cells, style="background:none")


def _notices(state: RunState) -> Markup:
    return join(element("div", f"⚠ {shorten(text, 500)}") for text in state.notices[-_MAX_NOTICES:])


def _failure(state: RunState) -> Markup:
    """The error's first line, and the rest of it folded."""
    if not state.error:
        return Markup("")
    first, _, rest = state.error.partition("\n")
    colour = f"color:{_COLOURS['failed']};margin:6px 0"
    parts = [element("div", element("b", shorten(first, 500)), style=colour)]
    if rest.strip():
        fold = element("summary", "traceback")
        parts.append(element("details", fold, element("pre", _end(rest, 12_000), style=_TEXT)))
    return join(parts)


def _end(text: str, limit: int) -> str:
    """The end of a long text, where a traceback says what was wrong."""
    return text if len(text) <= limit else "…" + text[-limit:]


def _output(state: RunState, max_ranks: int, lines: int) -> Markup:
    ranks = [rank for rank in state.ranks if rank.tail]
    shown = sorted(ranks, key=lambda rank: rank.status != "failed")[:max_ranks]
    blocks = [_log(rank, lines) for rank in sorted(shown, key=lambda rank: rank.rank)]
    return join(blocks)


def _log(rank: RankState, lines: int) -> Markup:
    kept = rank.tail[-lines:]
    total = max(rank.num_lines + rank.open_line, len(kept))
    if total > len(kept):
        title = f"rank {rank.rank}: the last {len(kept)} of {total:,} lines"
    else:
        title = f"rank {rank.rank}: {total} line{'s' if total != 1 else ''} of output"
    text = "\n".join(shorten(line, 500) for line in kept)
    fold = element("summary", title)
    return element("details", fold, element("pre", text, style=_TEXT), style="margin:4px 0")


# ---- text ----------------------------------------------------------------------------------


def _text(state: RunState, now: float) -> str:
    lines = [*summary.summary_lines(state, now=now), *state.notices[-_MAX_NOTICES:]]
    return "\n".join([*lines, _end(state.error, 4000)] if state.error else lines)
