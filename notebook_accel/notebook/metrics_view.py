"""The metrics of the live panel: controls that choose which are shown and how, and their charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accel.launch.view.progress import name_of
from notebook_accel.render.charts import PAGE_SIZE, render_charts

if TYPE_CHECKING:
    from notebook_accel.launch.control.curves import LiveCurves
    from notebook_accel.notebook.clicks import ClicksAfterTheCell
    from notebook_accel.notebook.widgets import PanelWidgets

# Charts are larger than the rest of the panel, and nobody reads a curve five times a second.
_DRAW_SECONDS = 1.0
_SMOOTHING = (
    ("as logged", 0.0),
    ("smooth 0.6", 0.6),
    ("smooth 0.9", 0.9),
    ("smooth 0.97", 0.97),
)


class MetricsView:
    """The part of a live panel that shows the charts of the metrics, one page of them at a time."""

    def __init__(self, clicks: ClicksAfterTheCell, widgets: PanelWidgets) -> None:
        self._page = 0
        self._drawn: tuple[Any, ...] = ()
        self._drawn_at = 0.0
        self._groups: dict[str, list[str]] = {}
        self._title = widgets.make(ipywidgets.HTML, "metrics", classes="na-log-title")
        choices = [
            widgets.make(
                ipywidgets.Dropdown,
                options=options,
                description=name,
                tooltip=about,
                classes="na-filter",
            )
            for name, options, about in (
                ("Which metrics", [("all", "")], "Metrics by their prefix"),
                ("Scale", [("linear", False), ("log", True)], "Scale"),
                ("Smoothing", _SMOOTHING, "Exponential mean over the steps"),
            )
        ]
        self._group, self._scale, self._smoothing = choices
        self._before, self._after = (
            widgets.make(
                ipywidgets.Button, description=name, tooltip=about, classes="na-small-button"
            )
            for name, about in (("← back", "The metrics before these"), ("more →", "More metrics"))
        )
        self._before.on_click(lambda _: self._turn(-1))
        self._after.on_click(lambda _: self._turn(1))
        self._group.observe(lambda _: self._turn(-self._page), names="value")
        buttons = [self._before, self._after]
        self._pager = widgets.make(ipywidgets.HBox, buttons, classes="na-pager")
        parts = [self._title, *choices, self._pager]
        bar = widgets.make(ipywidgets.HBox, parts, classes="na-log-bar")
        self._charts = widgets.make(ipywidgets.HTML)
        content = [bar, self._charts]
        self.box = widgets.make(ipywidgets.VBox, content, classes="na-metrics na-hidden")
        for widget in (*choices, *buttons):
            clicks.let_through(widget)

    def draw(self, curves: LiveCurves, *, now: float) -> None:
        """Draw at once after a click, else at most once a second; ``now`` is monotonic."""
        is_log, smoothing = self._scale.value, self._smoothing.value
        chosen = (self._group.value, self._page, is_log, smoothing)
        key = (*chosen, curves.version)
        if key == self._drawn:
            return
        if self._drawn[:-1] == chosen and now < self._drawn_at + _DRAW_SECONDS:
            return
        names = curves.names
        if not names:
            return
        self._drawn, self._drawn_at = key, now
        if len(names) != len(self._groups.get("", ())):
            self._offer(names)
        shown = self._groups.get(self._group.value, names)
        pages = -(-len(shown) // PAGE_SIZE)
        self._page = max(0, min(self._page, pages - 1))
        first = self._page * PAGE_SIZE
        page = shown[first : first + PAGE_SIZE]
        self._title.value = (
            f"metrics {first + 1}-{first + len(page)} of {len(shown)}" if pages > 1 else "metrics"
        )
        # On a narrow page only a title that says something has room.
        (self._title.remove_class if pages > 1 else self._title.add_class)("na-optional")
        self._before.disabled = self._page == 0
        self._after.disabled = self._page >= pages - 1
        (self._pager.remove_class if pages > 1 else self._pager.add_class)("na-hidden")
        # Rank 0's, which alone logs.
        charts = {name: next(iter(curves.of(name).values())) for name in page}
        # The last page is as high as the others.
        num_places = PAGE_SIZE if pages > 1 else 0
        markup = render_charts(charts, is_log=is_log, smoothing=smoothing, num_places=num_places)
        self._charts.value = str(markup)
        # All at once: the choices alone would come before the charts.
        self.box.remove_class("na-hidden")

    def _offer(self, names: list[str]) -> None:
        self._groups = groups_of(names)
        options = [
            (f"{name_of(prefix)}/ ({len(found)})" if prefix else f"all ({len(found)})", prefix)
            for prefix, found in self._groups.items()
        ]
        chosen, page = self._group.value, self._page
        # Setting the options chooses the first one, and another choice leads to the first page.
        self._group.options = options
        self._group.value, self._page = chosen, page
        (self._group.remove_class if len(options) > 2 else self._group.add_class)("na-hidden")

    # ---- clicks: they only leave a note, since they may come from another thread ----

    def _turn(self, step: int) -> None:
        self._page = max(0, self._page + step)


def groups_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Group by the prefix before the first slash; the key "" has all names."""
    groups: dict[str, list[str]] = {"": list(names)}
    for name in names:
        prefix, slash, _ = name.partition("/")
        if slash and prefix:
            groups.setdefault(prefix, []).append(name)
    return groups
