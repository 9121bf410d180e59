"""How the trials of a sweep stand, as lines of text and as HTML: a row a trial, the best first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from notebook_accel.launch.control.curves import Point
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view.summary import SIGNS, elapsed
from notebook_accel.notebook.comparison import best_first, best_of
from notebook_accel.notebook.sweeps.trial import Trial
from notebook_accel.render.charts import saved_chart, sparkline
from notebook_accel.render.markup import (
    element,
    join,
    message_bytes,
    pick_script,
    shorten,
    style_element,
)
from notebook_accel.render.snapshot import COLOURS

# Rows and columns of arguments that are shown; characters of a cell, and of an error.
_MAX_ROWS = 200
_MAX_NAMES = 8
_MAX_CELL = 24
_MAX_ERROR = 80
# Bytes of the rows that a live panel shows: with the chart it has 20 KB at most.
_LIVE_BYTES = 9_000
# A row picks its trial in the list above.
_PICK = pick_script("[data-n]", "r.dataset.n", "na-trial-filter")
_CELL = "white-space:nowrap;text-align:left"
_SCROLLS = "overflow:auto;max-height:420px;margin:6px 0"


def in_order(trials: Sequence[Trial], mode: str) -> list[Trial]:
    """Return the trials, the one with the best newest value first; those without one are last."""
    return best_first(trials, lambda one: None if one.status == "failed" else one.newest, mode)


def rows(trials: Sequence[Trial], metric: str | None) -> list[list[str]]:
    """Return the cells of the table: a row of titles, then a row for each of the first trials.

    Columns that are empty for all are left out.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.settings))[:_MAX_NAMES]
    head = ["trial", "state", *(one_line(name, _MAX_CELL) for name in names)]
    head += [one_line(metric or "", _MAX_CELL), "best", "curve", "took", "error"]
    found = [_row(trial, names) for trial in trials[:_MAX_ROWS]]
    columns = [(title, *cells) for title, *cells in zip(head, *found, strict=True) if any(cells)]
    return [list(row) for row in zip(*columns, strict=True)]


def _row(trial: Trial, names: Sequence[str]) -> list[str]:
    state, best = trial.run.state, best_of(trial.curve, trial.mode)
    chosen = {
        name: one_line(wording.arguments([value], {}), _MAX_CELL)
        for name, value in trial.settings.items()
    }
    return [
        str(trial.number),
        f"{SIGNS.get(trial.status, '■' if trial.status == 'pruned' else '●')} {trial.status}",
        *(chosen.get(name, "") for name in names),
        "" if trial.newest is None else wording.number(trial.newest),
        "" if best is None else wording.number(best),
        sparkline(trial.curve.points()),
        wording.span(elapsed(state, state.now())),
        one_line(trial.last_line_of_error(), _MAX_ERROR),
    ]


def _head(cells: Sequence[str], style: str | None = None) -> Markup:
    return element("thead", element("tr", *(element("th", cell, style=style) for cell in cells)))


def render_live(
    trials: Sequence[Trial], metric: str | None, notes: Sequence[str], picked: int | None
) -> Markup:
    """Return chart and rows of the live panel, of the trials in order as many as have room."""
    head, *body = rows(trials, metric) or [[]]
    found, room = [], _LIVE_BYTES
    for trial, cells in zip(trials, body, strict=False):
        kind = {"pruned": "stopped"}.get(trial.status, trial.status)
        parts = [element("td", cells[0]), element("td", cells[1], class_=f"na-{kind}")]
        is_picked = "true" if trial.number == picked else None
        parts += [element("td", cell) for cell in cells[2:]]
        found.append(element("tr", *parts, data_n=trial.number, aria_selected=is_picked))
        room -= message_bytes(found[-1])
        if room < 0:
            break
    table = element("table", _head(head), element("tbody", *found, onmousedown=_PICK))
    hidden = len(trials) - len(found)
    notes = [*([f"{hidden} more trials are in the list above"] if hidden else []), *notes]
    curves = _curves(trials)
    chart = _chart(curves, metric, is_live=True) if curves else Markup("")
    return element(
        "div",
        element("div", style_element("charts"), chart, class_="na-together") if curves else "",
        element("div", table, class_="na-trials") if found else "",
        *(element("div", shorten(note, 400), class_="na-muted na-fold") for note in notes),
        class_="na",
    )


def _curves(trials: Sequence[Trial]) -> dict[str, Sequence[Point]]:
    """Return the curves by what a trial is called; none before one of them is more than a point."""
    found: dict[str, Sequence[Point]] = {
        _called(trial): points for trial in trials if (points := trial.curve.points())
    }
    return found if max(map(len, found.values()), default=0) > 1 else {}


def _called(trial: Trial) -> str:
    return shorten(f"trial {trial.number} ({wording.arguments((), trial.settings)})", 60)


def _chart(curves: dict[str, Any], metric: str | None, *, is_live: bool = False) -> Markup:
    words = f"{shorten(metric or '', 60)} · in colour: {next(iter(curves))}"
    title = element("div", words, style="opacity:.65;margin-top:6px")
    return join([title, saved_chart(curves, alt=words, is_live=is_live)])


def as_bundle(
    title: str, trials: Sequence[Trial], metric: str | None, notes: Sequence[str]
) -> dict[str, str]:
    """Return table and chart as a MIME bundle: text, and HTML in which all text is escaped."""
    head, *body = cells = rows(trials, metric) or [[]]
    if len(trials) > len(body):
        notes = [f"{len(trials) - len(body)} more trials are in .to_pandas()", *notes]
    found = []
    for trial, (number, state, *rest) in zip(trials, body, strict=False):
        colour = COLOURS.get(trial.status)
        style = f"{_CELL};color:{colour}" if colour else _CELL
        row = element("td", number, style=_CELL), element("td", state, style=style)
        found.append(element("tr", *row, *(element("td", cell, style=_CELL) for cell in rest)))
    table = element("table", _head(head, _CELL), element("tbody", *found), style="margin:0")
    parts: list[Markup | str] = [element("b", title)]
    if curves := _curves(trials):
        parts.append(_chart(curves, metric))
    parts += [element("div", table, style=_SCROLLS)] if body else []
    parts += [element("div", note) for note in notes]
    frame = element("div", join(parts), style="max-width:1000px")
    return {
        "text/plain": "\n".join([title, *wording.aligned(cells), *notes]),
        "text/html": str(frame),
    }
