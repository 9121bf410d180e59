"""What a person changes by the panel while a run trains: save now, pause, its knobs, a clone.

A click or a moved slider asks for an action and returns (actions/common_actions.py). A control
shows what was asked for until the ranks have taken or refused it, then the value that they have.

    Clone --> a control for each --> Start --> a run, whose panel comes below, in the same box
                                          \\-> one more trial of the sweep

A click has no cell, so a clone has no other place. The box stays until the run and all its clones
have ended (``PanelBox``).
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import ipywidgets

from notebook_accel import wire
from notebook_accel.launch import run_list
from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import clone_run
from notebook_accel.launch.run import Run, call_of, request_of, save_now
from notebook_accel.launch.text import wording
from notebook_accel.notebook.display_slot import start_thread
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.rank.knobs import checked
from notebook_accel.render.markup import element, join, shorten
from notebook_accel.wire import KnobMade

_SAVE_TOOLTIP = (
    "All ranks save at the same step: the function, if it reads accelerator.should_save; else a "
    "checkpoint is written, into the folder of resume_or_start or of the run"
)
_PAUSE_TOOLTIP = "All ranks wait at the same step, and the devices are free, until Go on"
_WAITS = "the ranks have this value until they take the new one at a common step"
# More would push the metrics out of sight.
MAX_KNOBS = 12
_STEPS_OF_SLIDER = 200


class Controls:
    """The buttons "Save now" and "Pause", and a control for each knob that the function has made.

    Attributes:
        buttons: the two buttons; none for a run whose ranks this kernel cannot ask.
        box: the controls of the knobs, and a line about what came of the last click.

    Args:
        run: the run.
        widgets: makes the widgets of the panel.
    """

    def __init__(self, run: Run, widgets: PanelWidgets) -> None:
        self._run = run
        self._widgets = widgets
        self._knobs: dict[str, _KnobControl] = {}
        self._saving: Future[None] | None = None
        self._pausing: Future[None] | None = None
        self._said = ""
        self._notice = widgets.make(ipywidgets.HTML, classes="na-hidden")
        self.box = widgets.make(ipywidgets.VBox, [self._notice], classes="na-controls")
        look = "na-small-button na-{}"
        self._save = widgets.button("Save now", _SAVE_TOOLTIP, self._on_save, look.format("save"))
        self._pause = widgets.button("Pause", _PAUSE_TOOLTIP, self._on_pause, look.format("pause"))
        self.buttons = [self._save, self._pause] if call_of(run).can_act else []

    def say(self, text: str) -> None:
        """Show a line from the next drawing on."""
        self._said = text

    def draw(self, state: RunState) -> None:
        """Update buttons and controls; only what has changed is sent to the page."""
        is_paused = state.status == "paused"
        is_saving, is_pausing = _waits(self._saving), _waits(self._pausing)
        trains = state.status == "running"
        self._save.description = "Saving" if is_saving else "Save now"
        self._save.disabled = is_saving or not trains
        names = ("Pausing", "Going on") if is_pausing else ("Pause", "Go on")
        self._pause.description = names[is_paused]
        self._pause.disabled = is_pausing or not (trains or is_paused)
        shown = list(state.knobs)[:MAX_KNOBS] if call_of(self._run).can_act else []
        new = [name for name in shown if name not in self._knobs]
        for name in new:
            self._knobs[name] = _KnobControl(state.knobs[name], self._widgets, self._set)
        if new:
            rows = [control.row for control in self._knobs.values()]
            self.box.children = (*rows, self._notice)
        for name, control in self._knobs.items():
            control.draw(state.knobs[name], is_open=trains or is_paused)
        # Among knobs it has its room from the start, so that its words move nothing.
        has_line = bool(self._said or state.knobs)
        said = element("div", self._said, role="status", class_="na-said")
        lines = [said] if has_line else []
        if len(state.knobs) > MAX_KNOBS:
            more = f"{len(state.knobs) - MAX_KNOBS} more knobs: run.set(name=value)"
            lines.append(element("div", more, class_="na-muted"))
        self._notice.value = str(element("div", join(lines), class_="na"))
        (self._notice.remove_class if lines else self._notice.add_class)("na-hidden")

    # ---- clicks, which may come from any thread: they ask, and the next drawing shows it ----

    def _on_save(self) -> None:
        self._saving = self._ask("Save now", partial(save_now, self._run))

    def _on_pause(self) -> None:
        call, is_paused = call_of(self._run), self._run.status == "paused"
        act = call.go_on if is_paused else partial(call.act, wire.Action(kind="pause"))
        self._pausing = self._ask("Go on" if is_paused else "Pause", act)

    def _set(self, knob: wire.KnobMade, value: object) -> Future[None] | None:
        def act() -> Future[None]:
            values = {knob.name: checked(knob, value)}
            return call_of(self._run).act(wire.Action(kind="set", values=values))

        return self._ask(knob.name, act)

    def _ask(self, what: str, ask: Callable[[], Future[None]]) -> Future[None] | None:
        """Ask for something, and keep the line that the panel says of it in the end."""

        def note(done: Future[None]) -> None:
            state = self._run.state
            when = wording.clock(state.now() - state.started)
            error = done.exception()
            came = "done on all ranks" if error is None else shorten(str(error), 300)
            self._said = f"{what}: {came} ({when})"

        try:
            asked = ask()
        except Exception as error:  # of a handler it would go to the cell that ran last
            self._said = f"{what}: {error}"
            return None
        asked.add_done_callback(note)
        return asked


class _KnobControl:
    """The control of one knob, between its name and the value that the ranks have meanwhile."""

    def __init__(
        self,
        knob: wire.KnobMade,
        widgets: PanelWidgets,
        ask: Callable[[wire.KnobMade, object], Future[None] | None],
    ) -> None:
        self._knob = knob
        self._ask = ask
        self._shown: wire.KnobMade | None = None
        self._asked: Future[None] | None = None
        self._drawing_thread = 0
        self.control = control_of(knob, widgets)
        self._now = widgets.make(ipywidgets.HTML, classes="na-knob-now")
        self.row = row_of(knob, self.control, self._now, widgets=widgets)
        self.control.observe(self._on_change, names="value")

    def draw(self, knob: wire.KnobMade, *, is_open: bool) -> None:
        """Show the value that the ranks have, unless a newer one is on its way to them."""
        self._knob = knob
        self.control.disabled = not is_open
        waits = _waits(self._asked)
        was_refused = self._asked is not None and not waits and self._asked.exception() is not None
        text = element("div", f"now {_shown(knob.value)}", class_="na na-muted", title=_WAITS)
        self._now.value = str(text) if waits else ""
        if waits or (knob is self._shown and not was_refused):
            return
        self._asked, self._shown = None, knob
        self._drawing_thread = threading.get_ident()
        try:
            self.control.value = knob.value
        finally:
            self._drawing_thread = 0

    def _on_change(self, _change: Any) -> None:
        if self._drawing_thread == threading.get_ident():
            return
        self._asked = self._ask(self._knob, value_in(self.control, self._knob))
        if self._asked is None:  # refused: the next drawing takes it back
            self._shown = None


def row_of(knob: wire.KnobMade, *parts: Any, widgets: PanelWidgets) -> Any:
    """Return the knob's name and the parts in a row."""
    name = element("div", shorten(knob.name, 60), class_="na", title=shorten(knob.name, 200))
    label = widgets.make(ipywidgets.HTML, str(name), classes="na-knob-name")
    return widgets.make(ipywidgets.HBox, [label, *parts], classes="na-knob")


def control_of(knob: wire.KnobMade, widgets: PanelWidgets) -> Any:
    """Make the control that fits the type and the range of a knob."""
    kind, range_ = _kind_of_control(knob)
    # The range stands before the value: within one that is not set yet that would be cut.
    return widgets.field(kind, knob.name, knob.name, classes="na-set", **range_, value=knob.value)


def _kind_of_control(knob: wire.KnobMade) -> tuple[Any, dict[str, Any]]:
    low, high, is_whole = knob.low, knob.high, isinstance(knob.value, int)
    if knob.choices:
        return ipywidgets.Dropdown, {"options": [(str(choice), choice) for choice in knob.choices]}
    if isinstance(knob.value, bool):
        return ipywidgets.Checkbox, {"indent": False}
    # A slider asks once it is let go: each value is a step that all ranks agree on.
    once = {"continuous_update": False}
    if isinstance(knob.value, str):
        return ipywidgets.Text, once
    if low is None or high is None or not math.isfinite(low + high) or low == high:
        return ipywidgets.IntText if is_whole else ipywidgets.FloatText, once
    if is_whole and not knob.log:
        return ipywidgets.IntSlider, {"min": math.ceil(low), "max": math.floor(high), **once}
    start, end = (math.log10(low), math.log10(high)) if knob.log else (low, high)
    steps = {"min": start, "max": end, "step": (end - start) / _STEPS_OF_SLIDER}
    kind = ipywidgets.FloatLogSlider if knob.log else ipywidgets.FloatSlider
    return kind, {**steps, "readout_format": ".3g", **once}


def value_in(control: Any, knob: wire.KnobMade) -> Any:
    """Return what a person has chosen in the control of a knob."""
    value = control.value
    if not isinstance(control, ipywidgets.FloatLogSlider) or value == knob.value:
        return value
    # The ends of a scale of exponents are not quite those of the range.
    value = min(max(float(f"{value:.3g}"), knob.low or 0.0), knob.high or math.inf)
    return round(value) if isinstance(knob.value, int) else value


def _waits(asked: Future[None] | None) -> bool:
    return asked is not None and not asked.done()


def _shown(value: object) -> str:
    return wording.number(value) if isinstance(value, float) else shorten(str(value), 30)


# ---- the form by which a run is cloned ----------------------------------------------------

_TOOLTIP = (
    "Launch the same function again with other arguments or knobs. Once the run has ended, "
    "run.clone(...) does"
)
_GONE = "Clone: the run's handle, which has the function, is gone; launch again"
_WARM = "Begin with this run's training as it is at its next common step, instead of anew"


class Cloneable(NamedTuple):
    """A run, the call of its function, and what clones it and returns a line about the clone.

    ``clone`` gets the arguments that differ and, by the names that ``clone_run`` takes, all
    knobs, the name and ``warm``.
    """

    run: Run
    call: partial[Any]
    clone: Callable[..., str]


def cloneable(run: Run, below: Callable[[], Any]) -> Cloneable | None:
    """Return None where the run's handle is gone, which alone has the function.

    Args:
        below: makes the view of a clone.
    """
    handle = next((one for one in run_list.runs() if one.id == run.id), run)
    asked = request_of(handle)
    if asked is None or run.state.session or run.state.detached:
        return None
    call = partial(asked.function, *asked.args, **asked.kwargs)
    return Cloneable(run, call, partial(_clone_below, asked, run, below))


def _clone_below(
    request: LaunchRequest,
    run: Run,
    below: Callable[[], Any],
    changes: Mapping[str, Any],
    **how: Any,
) -> str:
    view = below()
    try:
        clone = clone_run(request, run, changes, block=False, view=view, **how)
    except Exception:
        view.give_up()
        raise
    # Its handle stays until it has ended, by which it can be cloned too.
    clone.add_done_callback(run_list.keep)
    return f"the clone has begun, below: {clone.name}"


class CloneForm:
    """The button "Clone", and the form that it opens.

    Args:
        widgets: makes the widgets of the panel.
        find: returns what is to be cloned.
        say: shows a line in the panel.
    """

    def __init__(
        self,
        widgets: PanelWidgets,
        find: Callable[[], Cloneable | None],
        say: Callable[[str], None],
    ) -> None:
        self._widgets, self._find, self._say = widgets, find, say
        self._opened: Cloneable | None = None
        # What a clone is being made of, unless the form was opened or closed since.
        self._starting: Cloneable | None = None
        self._fields: list[tuple[KnobMade, Any]] = []
        box = ipywidgets.Checkbox
        self._warm = widgets.field(box, "warm", _WARM, indent=False, classes="na-warm")
        self._start = widgets.button("Start", "Launch the clone", self._on_start)
        self._cancel = widgets.button("Cancel", "Close this form", self.close)
        self.box = widgets.make(ipywidgets.VBox, classes="na-controls na-clone")
        self.button = widgets.button("Clone", _TOOLTIP, self._on_open)

    def close(self) -> None:
        self._opened = self._starting = None
        self.box.children = ()

    def _on_open(self) -> None:
        found = None if self._opened else self._find()
        self._say("" if self._opened or found else _GONE)
        self.close()
        if found is None:
            return
        bound = inspect.signature(found.call.func).bind(*found.call.args, **found.call.keywords)
        bound.apply_defaults()
        given = bound.arguments.items()
        plain = {
            name: KnobMade(name=name, value=value) for name, value in given if _is_plain(value)
        }
        shown = [*{**plain, **found.run.state.knobs}.values()][:MAX_KNOBS]
        self._opened = found
        self._fields = [(knob, control_of(knob, self._widgets)) for knob in shown]
        rows = [row_of(knob, control, widgets=self._widgets) for knob, control in self._fields]
        title = self._widgets.make(ipywidgets.HTML, "clone with", classes="na-clone-title")
        ends = [self._warm, self._start, self._cancel]
        last = self._widgets.make(ipywidgets.HBox, ends, classes="na-knob")
        self.box.children = (title, *rows, last)

    def _on_start(self) -> None:
        opened, shown = self._opened, (self._fields, self.box.children)
        if opened is None:
            return
        # At the first click: the second one of a double click may come when the clone has begun.
        self.close()
        self._starting = opened
        # In a thread: a warm one begins once the run has come to a step.
        start_thread(partial(self._clone, opened, *shown), name="notebook-accel-clone")

    def _clone(
        self, opened: Cloneable, fields: list[tuple[KnobMade, Any]], rows: Sequence[Any]
    ) -> None:
        self._say("the clone starts")
        try:
            chosen = {knob: value_in(control, knob) for knob, control in fields}
            changed = {knob.name: value for knob, value in chosen.items() if value != knob.value}
            # A knob begins with what the form shows, not with the function's own value; one that
            # has the name of an argument, as in ``knob("lr", lr)``, is changed by that alone.
            made = opened.run.state.knobs
            said = opened.clone(
                {name: value for name, value in changed.items() if name not in made},
                knobs={k.name: checked(k, value) for k, value in chosen.items() if k.name in made},
                name=wording.arguments((), changed),
                warm=self._warm.value,
            )
        except Exception as error:  # nobody else would be told
            said = f"Clone: {error}"
            if self._starting is opened:  # with what was chosen
                self._opened, self._fields, self.box.children = opened, fields, rows
        if self._starting is opened:  # it has the function's arguments
            self._starting = None
        self._say(said)


def _is_plain(value: object) -> bool:
    return isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))
