"""The charts of ``compare()`` and ``run.plot()``: those of a summary, live while a run trains.

    curves in memory of a run that goes on --+
    metrics.jsonl of one that has ended -----+--> Charts --> a slot in the cell's output

A thread draws the slot anew once a second, and ends with the last of the runs.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch import run_list
from notebook_accel.launch.control.curves import (
    MAX_POINTS,
    Curve,
    LiveCurves,
    chosen,
    mode_of,
    to_draw,
)
from notebook_accel.launch.control.metrics_file import MetricReader
from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.run import Run, call_of
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view import GuardedView, View
from notebook_accel.launch.view.progress import name_of
from notebook_accel.notebook.display_slot import DisplaySlot, start_thread
from notebook_accel.render import snapshot
from notebook_accel.render.charts import COLOURS, draw_metrics, sparkline
from notebook_accel.render.markup import element, style_element

T = TypeVar("T")
_DRAW_SECONDS = 1.0
_GOES_ON = "charts of runs that go on"
# Of a curve that is a cell of a table; runs whose curves are kept for that once they have ended.
_POINTS = 66
_MAX_RUNS = 256
_MAX_LABEL = 60


class Charts:
    """Charts of the metrics of some runs; a notebook shows them, and follows runs that go on.

    Args:
        runs: by what the legend calls them. Up to ten have a colour each; of more the best is in
            colour.
        names: the metrics to draw; empty for all.
        of: whose metrics they are, for errors.
        table: what is shown below, by its ``repr`` or as HTML.

    Raises:
        ConfigError: all runs have ended, and none has logged one of ``names``.
        FileNotFoundError: a run was deleted from disk.
    """

    def __init__(
        self, runs: Mapping[str, Run], names: Sequence[str] = (), *, of: str, table: Any = None
    ) -> None:
        for run in runs.values():
            call_of(run).folder.check()
        self._runs, self._names, self._table = runs, names, table
        self._ended: dict[str, dict[str, Curve]] = {}
        if not self._is_live:
            chosen(self._curves(()), names, of=of)

    @property
    def _is_live(self) -> bool:
        return any(call_of(run).curves is not None for run in self._runs.values())

    def _curves(self, names: Sequence[str]) -> dict[str, dict[str, Curve]]:
        """Return the curves by metric and run, of ``names`` or all."""
        found: dict[str, dict[str, Curve]] = {}
        for label, run in self._runs.items():
            # Asked before they are read: nothing comes after.
            has_ended = call_of(run).ended.is_set()
            curves = self._ended.get(label) or curves_of(run, in_detail=True)
            if has_ended:
                self._ended[label] = curves
            for name, curve in curves.items():
                found.setdefault(name, {})[label] = curve
        return {name: found[name] for name in names or to_draw(found) if name in found}

    def _nothing(self) -> str:
        """Return why there is no chart: nothing is logged yet, or nothing that was asked for."""
        logged = ", ".join(map(repr, self._curves(())))
        asked = ", ".join(map(repr, self._names))
        told = f"{asked}: not logged yet; there is {logged}"
        return told if logged else "no metric is logged yet"

    def __repr__(self) -> str:
        metrics = self._curves(self._names)
        rows = [
            [name_of(name), label, sparkline(curve.points()), wording.number(curve.last)]
            for name, curves in metrics.items()
            for label, curve in curves.items()
        ]
        rows = [[name, *rest] for name, _, *rest in rows] if len(self._runs) == 1 else rows
        text = wording.aligned(rows) if rows else [self._nothing()]
        table = [] if self._table is None else ["", repr(self._table)]
        return "\n".join([*text, *table])

    def _repr_html_(self, *, is_live: bool = False) -> str:
        metrics = self._curves(self._names)
        # A run keeps its colour in a chart that lacks another one.
        colours = dict(zip(self._runs, COLOURS, strict=False))
        is_each_in_colour = len(self._runs) in range(2, len(COLOURS) + 1)
        is_single = len(self._runs) == 1
        shown = {}
        for name, curves in [*metrics.items()][: snapshot.MAX_PLOTS]:
            labels = [*curves]
            if len(labels) > len(COLOURS):
                mode = mode_of(name)
                best = {label: best_of(curve, mode) for label, curve in curves.items()}
                labels = best_first(labels, best.get, mode)
            shown[name] = {"" if is_single else label: curves[label] for label in labels}
        legend = [
            element("span", element("b", "━ ", style=f"color:{colour}"), label)
            for label, colour in colours.items()
        ]
        row = "display:flex;flex-wrap:wrap;gap:2px 16px"
        rest = ", ".join(map(repr, [*metrics][snapshot.MAX_PLOTS :]))
        more = f"further metrics: {one_line(rest, 400)}; names=[...] chooses" if rest else ""
        parts = [
            style_element("charts") if is_live else "",
            element("div", *legend, style=row) if is_each_in_colour else "",
            draw_metrics(
                shown,
                colours=colours if is_each_in_colour else None,
                num_charts=len(shown),
                is_live=is_live,
            )
            if shown
            else element("div", self._nothing()),
            element("div", more, style=snapshot.MUTED) if more else "",
        ]
        frame = element(
            "div", *parts, class_=snapshot.NO_MATHS, style=f"max-width:1000px;{snapshot.FONT}"
        )
        # As text: Markup would escape what it is added to.
        return str(frame) + ("" if self._table is None else self._table.html(is_live=is_live))

    def _ipython_display_(self) -> None:
        is_live, slot = self._is_live, DisplaySlot()
        slot.show({"text/plain": repr(self), "text/html": self._repr_html_(is_live=is_live)})
        if is_live:
            start_thread(partial(self._follow, slot), name="notebook-accel-charts")

    def _follow(self, slot: DisplaySlot) -> None:
        is_live, guard = True, GuardedView(View()).guard
        while is_live:
            time.sleep(_DRAW_SECONDS)
            # Asked before it is drawn: nothing comes after.
            is_live = self._is_live
            guard(self._draw, slot, is_live)

    def _draw(self, slot: DisplaySlot, is_live: bool) -> None:
        # Text is for frontends that draw no updates: they have that of the first drawing.
        text = _GOES_ON if is_live else repr(self)
        slot.show({"text/plain": text, "text/html": self._repr_html_(is_live=is_live)})


def differing(runs: Sequence[Run]) -> list[str]:
    """Return of each run the arguments that are not those of all others, as text."""
    parts = [re.split(r", (?=\w+=)", run.state.arguments) for run in runs]
    return [
        ", ".join(part for part in own if not all(part in other for other in parts))
        for own in parts
    ]


def original_of(run: Run) -> tuple[str, Callable[[], dict[str, Curve]]]:
    """Return what the run is called of which this one is a clone or goes on with.

    The function reads its curves: there are none without such a run, or where it was deleted.
    """
    try:
        found = run_list.find_run(run.state.origin) if run.state.origin else None
    except NotebookAccelError:
        found = None
    if found is None:
        return "", dict
    about, _ = differing([found, run])
    name = one_line(found.name, _MAX_LABEL)
    label = one_line(f"{name} ({about})" if about else name, 2 * _MAX_LABEL)
    # Without its results, which may be gigabytes: whoever shows its curves keeps them no longer.
    return label, partial(curves_of, Run(call_of(found)))


def snapshot_of(run: Run, state: RunState, **how: Any) -> dict[str, str]:
    """Return the summary of a run, with the curves of its original."""
    curves = curves_of(run, in_detail=True)
    label, read_original = original_of(run)
    return snapshot.render_snapshot(state, curves, original=(label, read_original()), **how)


def called(runs: Sequence[tuple[str, Run]]) -> dict[str, Run]:
    """Return what the legend calls each run: by its label, and the arguments that differ."""
    names = [label.removesuffix(f" ({run.id})") for label, run in runs]
    texts = []
    for name, about in zip(names, differing([run for _, run in runs]), strict=True):
        # The name of one function says nothing of its runs, and that of a clone is what differs.
        is_enough = about in ("", name) or len({*names}) == 1
        texts.append((about or name) if is_enough else f"{name} ({about})")
    return {
        one_line(text if texts.count(text) == 1 else f"{name} ({run.id})", _MAX_LABEL): run
        for text, name, (_, run) in zip(texts, names, runs, strict=True)
    }


def best_first(
    items: Iterable[T], value_of: Callable[[T], float | None], mode: str | None
) -> list[T]:
    """Return the items, the one with the best value first; those without a finite one are last."""
    sign = -1 if mode == "max" else 1

    def place(item: T) -> float:
        value = value_of(item)
        return math.inf if value is None or not math.isfinite(value) else sign * value

    return sorted(items, key=place)


def curves_of(run: Run, *, in_detail: bool = False) -> dict[str, Curve]:
    """Return the curves by the metrics' names, each of the lowest rank that has logged it.

    Args:
        in_detail: for a chart. Else as coarse as a table's small curves, and read only once of a
            run that has ended.
    """
    call = call_of(run)
    live = call.curves
    if live is not None:
        return live.by_name()
    call.metrics.flush()
    if in_detail:
        return _read_curves.__wrapped__(call.folder.path)
    read = _read_curves if call.ended.is_set() else _read_curves.__wrapped__
    return read(call.folder.path, _POINTS)


@lru_cache(maxsize=_MAX_RUNS)
def _read_curves(folder: Path, max_points: int = MAX_POINTS) -> dict[str, Curve]:
    curves = LiveCurves(max_points, max_curves=math.inf)
    with suppress(OSError):  # of many runs all others are shown
        for row in MetricReader(folder).sample():
            curves.add(row["rank"], row["step"], {row["name"]: row["value"]})
    return curves.by_name()


def best_of(curve: Curve | None, mode: str | None) -> float | None:
    """Return the lowest or highest value that is finite; None without one, or without a mode."""
    values = [y for _, y in curve.points() if math.isfinite(y)] if curve is not None else []
    if mode is None or not values:
        return None
    return min(values) if mode == "min" else max(values)
