"""The form by which a run, or a trial of a sweep, is cloned: arguments, knobs, cold or warm.

    Clone --> a control for each --> Start --> a run, whose panel comes below, in the same box
                                          \\-> one more trial of the sweep

A click has no cell, so a clone has no other place. The box stays until the run and all its clones
have ended (``PanelBox``).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import ipywidgets

from notebook_accel.launch import run_list
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import clone_run
from notebook_accel.launch.run import Run, request_of
from notebook_accel.launch.text import wording
from notebook_accel.notebook.controls import MAX_KNOBS, control_of, row_of, value_in
from notebook_accel.notebook.display_slot import start_thread
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.rank.knobs import checked
from notebook_accel.wire import KnobMade

_TOOLTIP = "Launch the same function again with other arguments or knobs"
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
        self._fields: list[tuple[KnobMade, Any]] = []
        box = ipywidgets.Checkbox
        self._warm = widgets.field(box, "warm", _WARM, indent=False, classes="na-warm")
        # In a thread: a warm one begins once the run has come to a step.
        start = partial(start_thread, self._on_start, name="notebook-accel-clone")
        self._start = widgets.button("Start", "Launch the clone", start)
        self.box = widgets.make(ipywidgets.VBox, classes="na-controls na-clone")
        self.button = widgets.button("Clone", _TOOLTIP, self._on_open)

    def close(self) -> None:
        self._opened, self.box.children = None, ()

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
        last = self._widgets.make(ipywidgets.HBox, [self._warm, self._start], classes="na-knob")
        self.box.children = (title, *rows, last)

    def _on_start(self) -> None:
        opened = self._opened
        if self._start.disabled or opened is None:  # many people click twice
            return
        self._start.disabled = True
        self._say("the clone starts")
        try:
            chosen = {knob: value_in(control, knob) for knob, control in self._fields}
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
        self._say(said)
        self._start.disabled = False


def _is_plain(value: object) -> bool:
    return isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))
