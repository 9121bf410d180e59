"""The widgets of a live sweep, and below them the panel of the trial that a person has picked.

    title | picker, Stop all | chart and rows (one HTML widget) | the picked trial's buttons
    a slot of its own: the panel of that trial

The sweep's thread draws; clicks, which may come from any thread, leave a note for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets

from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.run import Run, call_of
from notebook_accel.launch.text import wording
from notebook_accel.notebook.clicks import clicks_for
from notebook_accel.notebook.cloning import Cloneable, CloneForm
from notebook_accel.notebook.dashboard import Dashboard
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.live_panel import PanelBox
from notebook_accel.notebook.sweeps import table
from notebook_accel.notebook.sweeps.trial import Trial
from notebook_accel.notebook.views import dashboard_in
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.render.markup import element, shorten, style_element

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
        self._about = widgets.make(ipywidgets.HTML, classes="na-trial-name")
        self._notice = widgets.make(ipywidgets.HTML)
        self._picker = widgets.field(
            ipywidgets.Dropdown,
            "Trial",
            "Open the panel of a trial; a click on its row does the same",
            options=[("open a trial", _NO_TRIAL)],
            classes="na-filter na-trial-filter",
        )
        about = "Start no further trial, and stop those that run"
        stop_all = widgets.button("Stop", about, stop, "na-stop")
        about = "Let this trial have the next free devices"
        self._hasten = widgets.button("Next", about, self._on_hasten)
        self._form = CloneForm(widgets, self._to_clone, self._say)
        close = widgets.button("Close", "Show no trial", self._on_close)
        self._picker.observe(self._on_pick, names="value")
        parts = [self._about, self._hasten, self._form.button, close]
        self._bar = widgets.make(ipywidgets.HBox, parts, classes="na-log-bar na-trial-bar")
        self._parts = (
            widgets.make(ipywidgets.HTML, str(style_element()), classes="na-gone"),
            widgets.make(ipywidgets.HBox, [self._picker, stop_all], classes="na-buttons"),
            self._title,
            self._box.body,
            self._bar,
            self._form.box,
            self._notice,
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
        self._title.value = str(
            element("div", element("div", element("b", title)), class_="na na-title")
        )
        self._box.body.value = str(table.render_live(trials, metric, notes, self._picker.value))
        picked = self._picked()
        (self._bar.add_class if picked is None else self._bar.remove_class)("na-hidden")
        if picked is not None:
            called = f"trial {picked.number}: {wording.arguments((), picked.settings)}"
            self._about.value = str(element("div", shorten(called, 120), class_="na"))
            is_paused = picked.run.status == "paused"
            (self._hasten.remove_class if is_paused else self._hasten.add_class)("na-hidden")
        said = element("div", self._said, role="status", class_="na na-muted na-said")
        self._notice.value = str(said) if self._said else ""

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

    def _on_pick(self, _change: Any) -> None:
        self._said, self.was_clicked = "", True

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
