"""A list that a notebook shows as a table of runs: when each began, what it was given, how it went.

A metric has a column: its last value and, where its name says what is better, its best one.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view.progress import last_values, name_of, spread
from notebook_accel.launch.view.summary import SIGNS, elapsed
from notebook_accel.notebook.markup import element

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.run import Run

__all__ = ["RunTable"]

T = TypeVar("T")
# Metrics with a column; of more the first ones have one.
_MAX_METRICS = 8
# Characters of what a run is called.
_MAX_LABEL = 60
# Words of a metric's name by which its lowest or its highest value is the best one.
_LOWER = re.compile(r"loss|error|perplexity|(^|[^a-z])(ppl|mse|rmse|mae|wer)([^a-z]|$)")
_HIGHER = re.compile(r"accuracy|(^|[^a-z])(acc|f1|auc|bleu|rouge|recall|reward)([^a-z]|$)")


class RunTable(list[T]):
    """A list that is shown as a table of ``runs``, as they are when it is shown.

    Args:
        items: what the list holds.
        runs: a row each, by what it is called.
        names: metrics that have a column; None: all that the runs logged.
    """

    def __init__(
        self,
        items: Iterable[T],
        runs: Sequence[tuple[str, Run]],
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(items)
        self._runs = runs
        self._names = names

    def _rows(self) -> list[list[str]]:
        """The head and a row for each run; columns that say nothing are left out."""
        states = [(label, run.state) for label, run in self._runs]
        logged = dict.fromkeys(name for _, state in states for name in last_values(state))
        names = list(logged if self._names is None else self._names)
        rows = [_facts(label, state, names[:_MAX_METRICS]) for label, state in states]
        head = ["run", "state", "started", "took", "arguments"]
        head += [*map(name_of, names[:_MAX_METRICS]), "notebook", "id"]
        columns = [(title, *cells) for title, *cells in zip(head, *rows, strict=True) if any(cells)]
        return [list(row) for row in zip(*columns, strict=True)]

    def __repr__(self) -> str:
        if not self._runs:
            return "[]"
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ([cell.ljust(n) for cell, n in zip(row, widths, strict=True)] for row in rows)
        return "\n".join("  ".join(row).rstrip() for row in padded)

    def _repr_html_(self) -> str | None:
        if not self._runs:
            return None
        head, *rows = self._rows()
        lines = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
        titles = element("tr", *(element("th", title) for title in head))
        return str(element("table", element("thead", titles), element("tbody", *lines)))


def _facts(label: str, state: RunState, names: Sequence[str]) -> list[str]:
    last = last_values(state)
    return [
        one_line(label, _MAX_LABEL),
        f"{SIGNS.get(state.status, '●')} {state.status}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started)),
        wording.span(elapsed(state, state.now())),
        state.arguments,
        *(_values(name, last.get(name, {}), state) for name in names),
        state.notebook,
        state.run,
    ]


def _values(name: str, last: Mapping[int, float], state: RunState) -> str:
    """The last value of a metric, and the best one of all ranks where it is known which that is."""
    if not last:
        return ""
    text = spread(last) or wording.number(next(iter(last.values())))
    found: Any = [rank.extremes[name] for rank in state.ranks if name in rank.extremes]
    low, high = _LOWER.search(name.lower()), _HIGHER.search(name.lower())
    if not found or bool(low) == bool(high):
        return text
    best = min(lowest for lowest, _ in found) if low else max(highest for _, highest in found)
    return f"{text} (best {wording.number(best)})"
