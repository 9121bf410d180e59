"""How the trials of a sweep stand, as lines of text and as HTML: a row a trial, the best first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view.summary import SIGNS, elapsed
from notebook_accel.notebook.markup import element, join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.notebook.sweeps.trial import Trial

# Rows and columns of arguments that are shown; characters of a cell, and of an error.
_MAX_ROWS = 50
_MAX_NAMES = 8
_MAX_CELL = 24
_MAX_ERROR = 80


def rows(trials: Sequence[Trial], metric: str | None, mode: str) -> list[list[str]]:
    """Return the cells of the table: a row of titles, then a row for each of the best trials.

    Columns that are empty for all are left out.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.arguments))[:_MAX_NAMES]
    sign = 1 if mode == "min" else -1

    def place(trial: Trial) -> tuple[float, int]:
        value = trial.newest
        has_value = value is not None and math.isfinite(value) and trial.status != "failed"
        return (sign * value if has_value and value is not None else math.inf), trial.number

    head = ["trial", "state", *(one_line(name, _MAX_CELL) for name in names)]
    head += [one_line(metric or "", _MAX_CELL), "best", "took", "error"]
    found = [_row(trial, names) for trial in sorted(trials, key=place)[:_MAX_ROWS]]
    columns = [(title, *cells) for title, *cells in zip(head, *found, strict=True) if any(cells)]
    return [list(row) for row in zip(*columns, strict=True)]


def _row(trial: Trial, names: Sequence[str]) -> list[str]:
    state = trial.run.state
    return [
        str(trial.number),
        f"{SIGNS.get(trial.status, '■' if trial.status == 'pruned' else '●')} {trial.status}",
        *(_cell(trial.arguments, name) for name in names),
        "" if trial.newest is None else wording.number(trial.newest),
        "" if trial.best is None else wording.number(trial.best),
        wording.span(elapsed(state, state.now())),
        one_line(trial.last_line_of_error(), _MAX_ERROR),
    ]


def _cell(arguments: dict[str, Any], name: str) -> str:
    if name not in arguments:
        return ""
    return one_line(wording.arguments([arguments[name]], {}), _MAX_CELL)


def as_bundle(title: str, cells: Sequence[Sequence[str]], notes: Sequence[str]) -> dict[str, str]:
    """Return the table as a MIME bundle: plain text, and HTML in which all text is escaped."""
    head, *body = [list(row) for row in cells] or [[]]
    table = element(
        "table",
        element("thead", element("tr", *(element("th", cell) for cell in head))),
        element("tbody", *(element("tr", *(element("td", c) for c in row)) for row in body)),
    )
    parts = [element("b", title), *([table] if body else [])]
    parts += [element("div", note) for note in notes]
    return {
        "text/plain": "\n".join([title, *wording.aligned(cells), *notes]),
        "text/html": str(element("div", join(parts))),
    }
