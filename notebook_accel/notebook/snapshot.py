"""The summary that a saved notebook keeps: a pure function of the run's state and its metrics.

It is shown where nobody runs code: JupyterLab without a kernel and untrusted, nbconvert,
GitHub. Their sanitisers drop inline SVG, style sheets, variables and ids, and some drop style
attributes as well. So it is plain tables, ``<details>`` and images, readable without any style,
and what style it has is inline, in tones that read on light and dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import wording
from notebook_accel.launch.outline import advance, folded, memory_of
from notebook_accel.notebook import plot
from notebook_accel.notebook.markup import Html, cut, element, join, weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_accel.launch.state import RankState, RunState

__all__ = ["MAX_BYTES", "Snapshot", "render_plots", "render_snapshot"]

MAX_BYTES = 120_000
_MAX_ROWS = 16
_MAX_PLOTS = 6
_MAX_CURVES = 8

_LINE = "1px solid rgba(128,128,128,.3)"
_MONO = "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
_FRAME = (
    f"border:{_LINE};border-radius:8px;padding:10px 14px;margin:2px 0;max-width:1000px;"
    "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px;"
    "line-height:1.5"
)
_CELL = f"text-align:left;padding:3px 12px 3px 0;border:none;border-top:{_LINE};font-size:13px"
_HEAD = "text-align:left;padding:0 12px 3px 0;border:none;font-weight:normal;opacity:.65"
_TABLE = "border:none;border-collapse:collapse;margin:8px 0 4px;width:100%;font-size:13px"
_TEXT = (
    f"{_MONO};white-space:pre-wrap;word-break:break-word;overflow:auto;max-height:320px;"
    "margin:4px 0;padding:6px 10px;background:rgba(128,128,128,.1);border-radius:4px;"
    "line-height:1.4;text-align:left"
)
_MUTED = "opacity:.65"
_COLOURS = {"succeeded": "#3a9a55", "failed": "#cf4f57", "stopped": "#b7791f"}
_SIGNS = {"succeeded": "✓", "failed": "✗", "stopped": "■"}


@dataclass(frozen=True)
class Snapshot:
    """The summary for pages and for text."""

    html: Html
    text: str

    @property
    def bundle(self) -> dict[str, str]:
        """The summary by MIME type."""
        return {"text/html": str(self.html), "text/plain": self.text}


def render_snapshot(
    state: RunState, metrics: Iterable[Mapping[str, Any]] = (), *, now: float | None = None
) -> Snapshot:
    """The summary of a run.

    Args:
        state: the run's state.
        metrics: every value given to ``accelerator.log``, as ``run.metrics`` has them.
        now: wall time in seconds, for a run that still goes on.
    """
    elapsed = (state.ended or now or state.started) - state.started
    curves = _curves(metrics)
    return Snapshot(_html(state, curves, elapsed), _text(state, curves, elapsed))


def render_plots(metrics: Iterable[Mapping[str, Any]], names: Sequence[str] = ()) -> Html:
    """The plots of metrics alone: of all of them, or of those with these names."""
    curves = _curves(metrics)
    chosen = {name: curves[name] for name in names} if names else curves
    return _plots(chosen, limit=max(_MAX_PLOTS, len(names)), width=420)


# ---- metrics -------------------------------------------------------------------------------

# Points of each metric by rank.
Curves = dict[str, dict[int, list[plot.Point]]]


def _curves(metrics: Iterable[Mapping[str, Any]]) -> Curves:
    """Points (step, value) of each metric by rank; a value without a step is counted."""
    curves: Curves = {}
    for row in metrics:
        points = curves.setdefault(row["name"], {}).setdefault(row["rank"], [])
        step = row["step"]
        points.append((float(len(points) if step is None else step), float(row["value"])))
    return curves


def _plots(curves: Curves, *, limit: int = _MAX_PLOTS, width: int = 250) -> Html:
    cards = [_card(name, by_rank, width) for name, by_rank in list(curves.items())[:limit]]
    if not cards:
        return Html("")
    row = element(
        "div", *cards, style="display:flex;flex-wrap:wrap;gap:6px 22px;margin:10px 0 2px"
    )
    hidden = list(curves)[limit:]
    if not hidden:
        return row
    return join([row, element("div", f"… and {', '.join(hidden[:20])}", style=_MUTED)])


def _card(name: str, by_rank: Mapping[int, Sequence[plot.Point]], width: int) -> Html:
    shown = dict(list(by_rank.items())[:_MAX_CURVES])
    title = [element("b", cut(name, 40)), f"\N{NO-BREAK SPACE} {_last(by_rank)}"]
    parts = [element("div", *title), *_key(shown)]
    if any(len(points) > 1 for points in shown.values()):
        labelled = {str(rank): points for rank, points in shown.items()}
        parts.append(plot.chart(labelled, alt=_alt(name, by_rank), width=width))
    return element("div", *parts)


def _key(by_rank: Mapping[int, object]) -> list[Html]:
    """Which rank has which colour, where there is more than one curve."""
    if len(by_rank) < 2:
        return []
    marks = [
        element(
            "span", "● ", element("span", f"rank {rank} ", style=_MUTED), style=_tone(index)
        )
        for index, rank in enumerate(by_rank)
    ]
    return [element("div", *marks, style="font-size:11px")]


def _tone(index: int) -> str:
    return f"color:{plot.COLOURS[index % len(plot.COLOURS)]}"


def _last(by_rank: Mapping[int, Sequence[plot.Point]]) -> str:
    values = [points[-1][1] for points in by_rank.values()]
    low, high = min(values), max(values)
    if low == high:
        return wording.number(low)
    return f"{wording.number(low)} to {wording.number(high)}"


def _alt(name: str, by_rank: Mapping[int, Sequence[plot.Point]]) -> str:
    """The curve in words: where it began, where it ended."""
    points = next(iter(by_rank.values()))
    first, last = (wording.number(point[1]) for point in (points[0], points[-1]))
    return f"{name}: {first} → {last} at step {wording.number(points[-1][0])}"


# ---- html ----------------------------------------------------------------------------------


def _html(state: RunState, curves: Curves, elapsed: float) -> Html:
    """The summary, with as many lines of output as fit."""
    head = [_title(state, elapsed), _table(state, elapsed), _notices(state), _failure(state)]
    plots = _plots(curves)
    for ranks, lines in ((8, 20), (8, 6), (2, 4), (0, 0)):
        body = element("div", *head, plots, _output(state, ranks, lines), style=_FRAME)
        if weight(body) <= MAX_BYTES:
            break
    return body


def _title(state: RunState, elapsed: float) -> Html:
    colour = f"color:{_COLOURS.get(state.status, '#2f86d6')}"
    return element(
        "div",
        element("b", cut(state.name, 60), style="font-size:14px"),
        " ",
        element("b", f"{_SIGNS.get(state.status, '●')} {state.status}", style=colour),
        " ",
        element("span", f"{_size(state)}, {wording.span(elapsed)}", style=_MUTED),
    )


def _size(state: RunState) -> str:
    return f"{state.world_size} rank{'s' if state.world_size != 1 else ''}"


_COLUMNS = ("rank", "state", "progress", "rate", "memory")


def _table(state: RunState, elapsed: float) -> Html:
    shown = _worth_a_row(state.ranks)
    rows = [_row(_facts(rank, elapsed), rank.status) for rank in shown]
    head = element("tr", *(element("th", name, style=_HEAD) for name in _COLUMNS))
    parts = [element("table", element("thead", head), element("tbody", *rows), style=_TABLE)]
    if len(shown) < state.world_size:
        parts.append(element("div", folded(_hidden(state, shown)), style=_MUTED))
    return join(parts)


def _row(facts: Sequence[str], status: str) -> Html:
    colour = _COLOURS.get(status)
    cells = [element("td", fact, style=_CELL) for fact in facts]
    if colour is not None:
        cells[1] = element("td", facts[1], style=f"{_CELL};color:{colour}")
    return element("tr", *cells, style="background:none")


def _worth_a_row(ranks: Sequence[RankState]) -> Sequence[RankState]:
    if len(ranks) <= _MAX_ROWS:
        return ranks
    first = sorted(ranks, key=lambda rank: (rank.status != "failed", rank.rank))
    return sorted(first[: _MAX_ROWS // 2], key=lambda rank: rank.rank)


def _hidden(state: RunState, shown: Sequence[RankState]) -> list[RankState]:
    seen = {rank.rank for rank in shown}
    return [rank for rank in state.ranks if rank.rank not in seen]


def _facts(rank: RankState, elapsed: float) -> tuple[str, str, str, str, str]:
    """What the table says of a rank, in the order of its columns."""
    items = rank.steps or rank.batches
    far = advance(rank, pace=items / elapsed if elapsed > 0 else None)
    how = f"{_SIGNS.get(rank.status, '●')} {rank.status}"
    progress = f"{far.count} {far.label}" if not rank.bars else f"{far.label} {far.count}"
    return (str(rank.rank), how, cut(progress.strip(), 100), far.rate, memory_of(rank))


def _notices(state: RunState) -> Html:
    return join(element("div", f"⚠ {cut(text, 500)}") for text in state.notices[-8:])


def _failure(state: RunState) -> Html:
    """The error's first line, and the rest of it folded."""
    if not state.error:
        return Html("")
    first, _, rest = state.error.partition("\n")
    colour = f"color:{_COLOURS['failed']};margin:6px 0"
    parts = [element("div", element("b", cut(first, 500)), style=colour)]
    if rest.strip():
        summary = element("summary", "traceback")
        parts.append(
            element("details", summary, element("pre", _end(rest, 12_000), style=_TEXT))
        )
    return join(parts)


def _end(text: str, limit: int) -> str:
    """The end of a long text, where a traceback says what was wrong."""
    return text if len(text) <= limit else "…" + text[-limit:]


def _output(state: RunState, max_ranks: int, lines: int) -> Html:
    ranks = [rank for rank in state.ranks if rank.tail]
    shown = sorted(ranks, key=lambda rank: rank.status != "failed")[:max_ranks]
    blocks = [_log(rank, lines) for rank in sorted(shown, key=lambda rank: rank.rank)]
    return join(blocks)


def _log(rank: RankState, lines: int) -> Html:
    kept = rank.tail[-lines:]
    total = max(rank.num_lines + rank.open_line, len(kept))
    if total > len(kept):
        title = f"rank {rank.rank}: the last {len(kept)} of {total:,} lines"
    else:
        title = f"rank {rank.rank}: {total} line{'s' if total != 1 else ''} of output"
    text = "\n".join(cut(line, 500) for line in kept)
    summary = element("summary", title)
    return element("details", summary, element("pre", text, style=_TEXT), style="margin:4px 0")


# ---- text ----------------------------------------------------------------------------------


def _text(state: RunState, curves: Curves, elapsed: float) -> str:
    shown = _worth_a_row(state.ranks)
    lines = [f"{state.name}: {state.status}, {_size(state)}, {wording.span(elapsed)}"]
    lines += _aligned([_COLUMNS, *(_facts(rank, elapsed) for rank in shown)])
    if len(shown) < state.world_size:
        lines.append(folded(_hidden(state, shown)))
    lines += [f"{name}: {_last(by_rank)}" for name, by_rank in curves.items()]
    lines += [*state.notices[-8:]]
    if state.error:
        lines.append(_end(state.error, 4000))
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
