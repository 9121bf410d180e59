"""The metrics of the live panel: controls that choose which are shown and how, and their charts."""

from __future__ import annotations

import csv
import io
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets

from notebook_accel.launch.control.curves import (
    Curve,
    LiveCurves,
    Point,
    metric_curves,
    thin_out,
    to_draw,
)
from notebook_accel.launch.view.progress import name_of
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.render.charts import ORIGINAL, draw_metrics, smoothed
from notebook_accel.render.markup import element, file_link, join

# Charts that are drawn at once.
_PAGE_SIZE = 6
# Charts are larger than the rest of the panel, and nobody reads a curve five times a second.
_DRAW_SECONDS = 1.0
# Of a range of steps: more would make the link of a table, and each drawing, slow.
_MAX_POINTS = 2_000
_ZOOM_TOOLTIP = (
    "Show these steps only, such as 100 to 500. Two clicks in a chart choose them, and a double "
    "click shows all again"
)
_CSV_TOOLTIP = "Give a link that saves the values of these charts as a table"
_SMOOTHING = (("as logged", 0.0), ("smooth 0.6", 0.6), ("smooth 0.9", 0.9), ("smooth 0.97", 0.97))


class MetricsView:
    """The part of a live panel that shows the charts of the metrics, one page of them at a time."""

    def __init__(
        self,
        widgets: PanelWidgets,
        read_rows: Callable[[], Sequence[Mapping[str, Any]]] = list,
        original: tuple[str, Callable[[], Mapping[str, Curve]]] = ("", dict),
    ) -> None:
        self._original, self._read_original = original
        self._read_rows = read_rows
        # The values of these steps, more than the curves of a run have of them.
        self._steps_read: tuple[float, float] | None = None
        self._detail: dict[str, list[Point]] = {}
        self._csv_asked = threading.Event()
        self._drawn: tuple[Any, ...] = ()
        self._drawn_at = 0.0
        self._groups: dict[str, list[str]] = {}
        choices = [
            widgets.field(ipywidgets.Dropdown, name, about, options=options, classes="na-filter")
            for name, options, about in (
                ("Which metrics", [("metrics", ("", 0))], "Metrics, six at a time"),
                ("Scale", [("linear", False), ("log", True)], "Scale"),
                ("Smoothing", _SMOOTHING, "Exponential mean over the steps"),
            )
        ]
        self._chosen, self._scale, self._smoothing = choices
        self._steps = widgets.field(
            ipywidgets.Text,
            "Steps",
            _ZOOM_TOOLTIP,
            placeholder="all steps",
            continuous_update=False,
            classes="na-search na-range",
        )
        self._link = widgets.make(ipywidgets.HTML, classes="na-csv")
        csv_button = widgets.button("CSV", _CSV_TOOLTIP, self._csv_asked.set)
        # On a narrow page only a title that says something has room.
        title = widgets.make(ipywidgets.HTML, "metrics", classes="na-log-title na-optional")
        parts = [title, *choices, self._steps, self._link, csv_button]
        bar = widgets.make(ipywidgets.HBox, parts, classes="na-log-bar")
        self._charts = widgets.make(ipywidgets.HTML)
        content = [bar, self._charts]
        self.box = widgets.make(ipywidgets.VBox, content, classes="na-metrics na-hidden")

    def draw(self, curves: LiveCurves, *, now: float) -> None:
        """Draw at once after a click, else at most once a second; ``now`` is monotonic."""
        is_log, smoothing = self._scale.value, self._smoothing.value
        typed = re.findall(r"(?<!\d)-?\d+", self._steps.value.replace(",", ""))
        numbers = [float(number) for number in typed]
        # None for all steps, and for what is no range.
        steps = (min(numbers), max(numbers)) if len(numbers) == 2 else None
        if steps != self._steps_read:
            self._steps_read, self._detail = steps, self._read(steps)
        chosen = (self._chosen.value, is_log, smoothing, steps)
        key = (*chosen, curves.version)
        is_csv_asked, found = self._csv_asked.is_set(), curves.by_name()
        names = to_draw(found)
        if not names or (key == self._drawn and not is_csv_asked):
            return
        is_calm = self._drawn[:-1] == chosen and not is_csv_asked
        if is_calm and now < self._drawn_at + _DRAW_SECONDS:
            return
        self._drawn, self._drawn_at = key, now
        if len(names) != len(self._groups.get("", ())):
            self._offer(names)
        prefix, page = self._chosen.value
        group = self._groups[prefix]
        shown = group[_PAGE_SIZE * page : _PAGE_SIZE * (page + 1)]
        original = self._read_original()
        points: dict[str, Sequence[Point]] = {}
        metrics: dict[str, dict[str, Curve]] = {}
        for name in shown:
            curve = found[name]
            kept = _between(curve.points(), steps)
            points[name] = max(kept, self._detail.get(name, []), key=len)
            metrics[name] = {"": curve.with_points(smoothed(points[name], smoothing))}
            before = _between(original[name].points(), steps) if name in original else []
            if before:
                metrics[name][ORIGINAL] = original[name].with_points(smoothed(before, smoothing))
            elif smoothing:
                metrics[name]["as logged"] = curve.with_points(points[name])
        is_there = any(ORIGINAL in each for each in metrics.values())
        about = element("div", f"pale: {self._original}", class_="na-original")
        # The last page is as high as the others.
        places = _PAGE_SIZE if len(group) > _PAGE_SIZE else 0
        drawn = draw_metrics(metrics, num_places=places, is_live=True, is_log=is_log)
        self._charts.value = str(join([about, drawn]) if is_there else drawn)
        if is_csv_asked:
            self._csv_asked.clear()
            table = io.StringIO()
            rows = ((name, f"{x:.0f}", y) for name, each in points.items() for x, y in each)
            csv.writer(table).writerows([("metric", "step", "value"), *rows])
            data = table.getvalue().encode()
            self._link.value = str(file_link("metrics.csv", "metrics.csv", data, "text/csv"))
        # All at once: the choices alone would come before the charts.
        self.box.remove_class("na-hidden")

    def _read(self, steps: tuple[float, float] | None) -> dict[str, list[Point]]:
        """Return the values of a range of steps by metric; nothing if the range is not over yet."""
        try:
            found = {} if steps is None else metric_curves(self._read_rows())
        except OSError:
            return {}
        # Of the lowest rank, as those of the run.
        points = {name: next(iter(by_rank.values())) for name, by_rank in found.items()}
        if steps is None or steps[1] > max((each[-1][0] for each in points.values()), default=0):
            return {}
        return {name: thin_out(_between(each, steps), _MAX_POINTS) for name, each in points.items()}

    def _offer(self, names: list[str]) -> None:
        # By the prefix before the first slash; the key "" has all names.
        self._groups = {"": names}
        for name in names:
            prefix, slash, _ = name.partition("/")
            if slash and prefix:
                self._groups.setdefault(prefix, []).append(name)
        options = []
        for prefix, found in self._groups.items():
            title = f"{name_of(prefix)}/" if prefix else "metrics"
            for page, first in enumerate(range(0, len(found), _PAGE_SIZE)):
                last = min(first + _PAGE_SIZE, len(found))
                these = f"{first + 1}-{last}" if first + 1 < last else f"{last}"
                which = f"{these} of {len(found)}" if len(found) > _PAGE_SIZE else f"({last})"
                options.append((f"{title} {which}", (prefix, page)))
        PanelWidgets.offer(self._chosen, options)
        is_choice = len(self._groups) > 2 or len(names) > _PAGE_SIZE
        (self._chosen.remove_class if is_choice else self._chosen.add_class)("na-hidden")


def _between(points: Sequence[Point], steps: tuple[float, float] | None) -> Sequence[Point]:
    if steps is None:
        return points
    return [point for point in points if steps[0] <= point[0] <= steps[1]]
