"""The widgets of a live sweep, and below them the panel of the trial that a person has picked.

    title | picker, Stop all | chart and rows (one HTML widget) | the picked trial's buttons
    a slot of its own: the panel of that trial

The sweep's thread draws; clicks, which may come from any thread, leave a note for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets
from markupsafe import Markup

from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.run import Run, call_of
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view.summary import SIGNS, elapsed
from notebook_accel.notebook.clicks import clicks_for
from notebook_accel.notebook.comparison import best_first, best_of
from notebook_accel.notebook.controls import Cloneable, CloneForm
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.live_panel import PanelBox
from notebook_accel.notebook.sweeps.trial import Trial
from notebook_accel.notebook.views import Dashboard, dashboard_in
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.render.charts import chart, sparkline
from notebook_accel.render.markup import element, message_bytes, pick_script, shorten, style_element
from notebook_accel.render.snapshot import COLOURS

# None as a value would leave the list blank.
_NO_TRIAL = -1


class SweepPanel:
    """The live panel of a sweep.

    Args:
        kernel: that of the notebook.
        slot: where the panel is shown, and in the end what replaces it.
        stop: ends the sweep.
        cloneable: returns a trial as what can be cloned, by one more trial.
    """

    def __init__(
        self,
        kernel: Any,
        slot: DisplaySlot,
        stop: Callable[[], None],
        cloneable: Callable[[Trial], Cloneable],
    ) -> None:
        self.clicks = clicks_for(kernel)
        self.was_clicked = False
        self._kernel = kernel
        self.below = DisplaySlot()
        self._box = PanelBox(slot)
        self._cloneable = cloneable
        self._trials: Sequence[Trial] = ()
        self._opened: tuple[Trial, Dashboard] | None = None
        self._drawn: RunState | None = None
        self._said = ""
        self._widgets = widgets = PanelWidgets(self.clicks)
        self._title = widgets.make(ipywidgets.HTML, classes="na-head")
        self._picker = widgets.field(
            ipywidgets.Dropdown,
            "Trial",
            "Open the panel of a trial; a click on its row does the same",
            options=[("open a trial", _NO_TRIAL)],
            classes="na-filter na-trial-filter",
        )
        about = "Start no further trial, and stop those that run"
        stop_all = widgets.button("Stop all", about, stop, "na-stop")
        about = "Let this trial have the next free devices"
        self._hasten = widgets.button("Next", about, self._on_hasten)
        self._form = CloneForm(widgets, self._to_clone, self._say)
        close = widgets.button("Close", "Show no trial", self._on_close)
        self._picker.observe(lambda _: self._say(""), names="value")
        parts = [self._hasten, self._form.button, close]
        self._bar = widgets.make(ipywidgets.HBox, parts, classes="na-log-bar na-trial-bar")
        self._parts = (
            widgets.make(
                ipywidgets.HTML, f"{style_element()}{style_element('charts')}", classes="na-gone"
            ),
            widgets.make(ipywidgets.HBox, [self._picker, stop_all], classes="na-buttons"),
            self._title,
            self._box.body,
            self._bar,
            self._form.box,
        )

    def show(self, text: str) -> None:
        """Display the panel in the cell that runs now; ``text`` is what a saved notebook has."""
        self._box.box.add_class("na-panel")
        self._box.box.add_class("na-sweep")
        self._box.box.children = self._parts
        self._box.show(text)
        self.below.show({"text/plain": "", "text/html": ""})

    def draw(
        self, title: str, trials: Sequence[Trial], metric: str | None, notes: Sequence[str]
    ) -> None:
        """Draw how the trials, in their order of values, stand."""
        self.was_clicked = False
        self._trials = trials
        if len(self._picker.options) != len(trials) + 1:
            names = [(f"trial {number}", number) for number in range(len(trials))]
            PanelWidgets.offer(self._picker, [("open a trial", _NO_TRIAL), *names])
        self._show_picked()
        notes = [*filter(None, [self._said]), *notes]
        self._title.value = str(
            element("div", element("div", element("b", title)), class_="na na-title")
        )
        self._box.body.value = as_bundle(
            title, trials, metric, notes, is_live=True, picked=self._picker.value
        )["text/html"]
        picked = self._picked()
        is_paused = picked is not None and picked.run.status == "paused"
        (self._bar.add_class if picked is None else self._bar.remove_class)("na-hidden")
        (self._hasten.remove_class if is_paused else self._hasten.add_class)("na-hidden")

    def follow(self) -> None:
        """Pass the state of the picked trial on to its panel."""
        if self._opened is not None:
            trial, view = self._opened
            state = trial.run.state
            if state is not self._drawn:
                self._drawn = state
                (view.close if trial.has_ended else view.update)(state)

    def finish(self, bundle: Mapping[str, str]) -> None:
        """Replace the panel by what the saved notebook keeps."""
        self.follow()
        self._box.finish(bundle, "show() of the sweep")
        self._widgets.close()

    def _picked(self) -> Trial | None:
        number = self._picker.value
        return next((trial for trial in self._trials if trial.number == number), None)

    def _show_picked(self) -> None:
        picked = self._picked()
        before = None if self._opened is None else self._opened[0]
        if picked is before:
            return
        if self._opened is not None:
            self._opened[1].give_up()
            self._opened = None
            self._form.close()
        if picked is not None:
            view = dashboard_in(self._kernel, waits=False, slot=self.below)
            view.open(Run(call_of(picked.run)))
            self._opened, self._drawn = (picked, view), None

    # ---- clicks ----------------------------------------------------------------------------

    def _on_hasten(self) -> None:
        if (trial := self._picked()) is not None:
            trial.is_next = True

    def _on_close(self) -> None:
        self._picker.value = _NO_TRIAL

    def _to_clone(self) -> Cloneable | None:
        trial = self._picked()
        return None if trial is None else self._cloneable(trial)

    def _say(self, text: str) -> None:
        self._said, self.was_clicked = shorten(text, 300), True


# ---- the table ----------------------------------------------------------------------------

# Rows and columns of arguments that are shown; characters of a cell, and of an error.
_MAX_ROWS = 200
_MAX_NAMES = 8
_MAX_CELL = 24
_MAX_ERROR = 80
# Bytes of the rows that a live panel shows: with the chart it has 20 KB at most.
_LIVE_BYTES = 8_500
# A row picks its trial in the list above.
_PICK = pick_script("[data-n]", "r.dataset.n", "na-trial-filter")


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
        f"{SIGNS.get(trial.status, '●')} {trial.status}",
        *(chosen.get(name, "") for name in names),
        "" if trial.newest is None else wording.number(trial.newest),
        "" if best is None else wording.number(best),
        sparkline(trial.curve.points()),
        wording.span(elapsed(state, state.now())),
        one_line(trial.last_line_of_error(), _MAX_ERROR),
    ]


def as_bundle(
    title: str,
    trials: Sequence[Trial],
    metric: str | None,
    notes: Sequence[str],
    *,
    is_live: bool = False,
    picked: int | None = None,
) -> dict[str, str]:
    """Return table and chart as a MIME bundle: text, and HTML in which all text is escaped.

    That of the live panel is drawn by its style sheets, and has the rows that it has room for.
    """
    head, *body = cells = rows(trials, metric) or [[]]
    # In a page that was reloaded it is a widget, whose tables have no padding of their own.
    plain = None if is_live else "white-space:nowrap;text-align:left;padding:6px"
    found, room = [], _LIVE_BYTES if is_live else math.inf
    for trial, (number, state, *rest) in zip(trials, body, strict=False):
        colour = COLOURS.get(trial.status)
        style = ";".join(filter(None, (plain, colour and f"color:{colour}"))) or None
        parts = [element("td", number, style=plain), element("td", state, style=style)]
        for column, cell in zip(head[2:], rest, strict=True):
            # Full blocks would be the darkest thing of the page.
            paler = "opacity:.55" if column == "curve" else None
            parts.append(element("td", cell, style=";".join(filter(None, (plain, paler))) or None))
        is_picked = "true" if trial.number == picked else None
        name = number if is_live else None
        found.append(element("tr", *parts, data_n=name, aria_selected=is_picked))
        room -= message_bytes(found[-1])
        if room < 0:
            break
    if hidden := len(trials) - len(found):
        where = "the list above" if is_live else ".to_pandas()"
        notes = [f"{hidden} more trials are in {where}", *notes]
    heads = (element("th", cell, style=plain) for cell in head)
    rest_of_table = element("tbody", *found, onmousedown=_PICK if is_live else None)
    style = None if is_live else "margin:0"
    table = element("table", element("thead", element("tr", *heads)), rest_of_table, style=style)
    curves = {
        shorten(f"trial {one.number} ({wording.arguments((), one.settings)})", 60): points
        for one in trials
        if (points := one.curve.points())
    }
    drawn: list[Markup] = []
    if max(map(len, curves.values()), default=0) > 1:
        words = f"{shorten(metric or '', 60)} · in colour: {next(iter(curves))}"
        drawn.append(element("div", words, style="opacity:.65;margin-top:6px"))
        drawn.append(chart(curves, alt=words, is_live=is_live))
    look = {"class_": "na"} if is_live else {"style": "max-width:1000px"}
    scrolls = None if is_live else "overflow:auto;max-height:420px;margin:6px 0"
    html = element(
        "div",
        "" if is_live else element("b", title),
        element("div", *drawn, class_="na-together") if drawn else "",
        element("div", table, class_="na-trials", style=scrolls) if found else "",
        *(element("div", shorten(note, 400), class_="na-muted na-fold") for note in notes),
        **look,
    )
    text = "\n".join([title, *wording.aligned(cells), *notes])
    return {"text/plain": text, "text/html": str(html)}
