"""The form of a live panel for a clone of its run with changes: arguments, knobs, cold or warm.

    Clone --> a control for each --> Start --> a run, whose panel comes below, in the same box

A click has no cell, so a clone has no other place. The box stays until the run and all its clones
have ended (``PanelBox``).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ipywidgets

from notebook_accel.errors import ConfigError
from notebook_accel.launch import run_list
from notebook_accel.launch.launcher import Cloner
from notebook_accel.launch.run import Run, cloner_of
from notebook_accel.launch.text import wording
from notebook_accel.notebook.controls import MAX_KNOBS, control_of, row_of, value_in
from notebook_accel.notebook.display_slot import start_thread
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.wire import KnobMade

_TOOLTIP = "Launch the same function again with other arguments or knobs, in a panel below this one"
_GONE = "the run's handle, which has the function, is gone; launch again"
_WARM = "Begin with this run's training as it is at its next common step, instead of anew"


class CloneForm:
    """The button "Clone" of a panel, and the form that it opens.

    Args:
        run: the run.
        widgets: makes the widgets of the panel.
        below: makes the view of a clone.
        say: shows a line in the panel.
    """

    def __init__(
        self, run: Run, widgets: PanelWidgets, below: Callable[[], Any], say: Callable[[str], None]
    ) -> None:
        self._run, self._widgets, self._below, self._say = run, widgets, below, say
        self._fields: list[tuple[KnobMade, Any]] = []
        # Handles of those that go on, by which they can be cloned too.
        self._clones: list[Run] = []
        box = ipywidgets.Checkbox
        self._warm = widgets.field(box, "warm", _WARM, indent=False, classes="na-warm")
        # In a thread: a warm one begins once the run has come to a step.
        start = partial(start_thread, self._clone, name="notebook-accel-clone")
        self._start = widgets.button("Start", "Launch the clone", start)
        self.box = widgets.make(ipywidgets.VBox, classes="na-controls na-clone")
        # A trial of a sweep is cloned there, as one more trial.
        can_clone = self._cloner is not None and run.state.trial is None
        self.buttons = [widgets.button("Clone", _TOOLTIP, self._on_open)] if can_clone else []

    @property
    def _cloner(self) -> Cloner | None:
        """What the handle has that the launch returned: it alone has the function."""
        handle = next((one for one in run_list.runs() if one.id == self._run.id), self._run)
        found = cloner_of(handle)
        return found if isinstance(found, Cloner) else None

    def _on_open(self) -> None:
        cloner = self._cloner
        if self.box.children or cloner is None:
            self._say("" if self.box.children else f"Clone: {_GONE}")
            self.box.children = ()
            return
        asked = cloner.request
        bound = inspect.signature(asked.function).bind(*asked.args, **asked.kwargs)
        bound.apply_defaults()
        plain = {name: one for name, one in bound.arguments.items() if _is_plain(one)}
        made = {name: KnobMade(name=name, value=value) for name, value in plain.items()}
        shown = [*{**made, **self._run.state.knobs}.values()][:MAX_KNOBS]
        self._fields = [(knob, control_of(knob, self._widgets)) for knob in shown]
        for _, control in self._fields:
            self._widgets.let_through(control)
        rows = [row_of(knob, control, widgets=self._widgets) for knob, control in self._fields]
        title = self._widgets.make(ipywidgets.HTML, "clone with", classes="na-clone-title")
        last = self._widgets.make(ipywidgets.HBox, [self._warm, self._start], classes="na-knob")
        self.box.children = (title, *rows, last)

    def _clone(self) -> None:
        if self._start.disabled:  # many people click twice
            return
        self._start.disabled = True
        self._say("the clone starts")
        cloner, view = self._cloner, self._below()
        try:
            if cloner is None:
                raise ConfigError(_GONE)
            chosen = [(knob, value_in(control, knob)) for knob, control in self._fields]
            changed = {knob.name: value for knob, value in chosen if value != knob.value}
            # A knob begins with what the form shows, not with the function's own value; one that
            # has the name of an argument, as in ``knob("lr", lr)``, is changed by that alone.
            knobs = {knob.name: one for knob, one in chosen if knob.name in self._run.state.knobs}
            both = knobs.keys() & inspect.signature(cloner.request.function).parameters.keys()
            name = wording.arguments((), changed) or cloner.request.name
            again = replace(cloner.request, name=name, knobs=knobs)
            changes = {name: value for name, value in changed.items() if name not in both}
            warm = self._warm.value
            clone = Cloner(again)(self._run, changes, warm=warm, block=False, view=view)
            self._clones.append(clone)
            clone.add_done_callback(self._let_go)
            self._say(f"the clone has begun, below: {clone.name}")
        except Exception as error:  # nobody else would be told
            view.give_up()
            self._say(f"Clone: {error}")
        self._start.disabled = False

    def _let_go(self, _: Run) -> None:
        """Leave what has ended to the list of runs, which keeps few results."""
        for clone in [one for one in self._clones if one.state.has_ended]:
            self._clones.remove(clone)
            run_list.keep(clone)


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, (bool, int, str))
