"""The live panel in a notebook: widgets that draw a run, and what is left of them at its end.

One HTML widget holds the whole panel, since a page keeps up with one message five times a second
but not with one a bar. Widget values may be set from any thread; printing and displaying may
not: the output would go to whatever cell ran last. So the cell displays the panel once, under an
id, and the end of the run replaces it by way of that id.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accel.launch.view import View
from notebook_accel.launch.view.progress import Throughput, last_values
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.panel import Details, render_panel
from notebook_accel.notebook.snapshot import Snapshot, render_line, render_snapshot
from notebook_accel.notebook.style import style_element

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.run import Run
    from notebook_accel.notebook.clicks import ClicksAfterTheCell

__all__ = ["Dashboard", "Panel"]

_DRAW_SECONDS = 0.2
_CLOCK_SECONDS = 1.0
# A server that drops messages of a flood drops the last one too: it is sent again this much
# later, from the end of the run.
_AGAIN_SECONDS = (1.0, 4.0)
_MAX_CURVE = 60
_ALL_RANKS = -1
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Panel:
    """The widgets of one panel, in the cell that made it.

    Args:
        name: of the run's function.
        world_size: number of its ranks.
        slot: where in the cell's output it goes.
        clicks: how clicks get through.
        stop: called when Stop is clicked.
        choose: called with the rank whose output is asked for, None for all.
    """

    def __init__(
        self,
        name: str,
        world_size: int,
        *,
        slot: DisplaySlot,
        clicks: ClicksAfterTheCell,
        stop: Callable[[], None],
        choose: Callable[[int | None], None],
    ) -> None:
        self._slot = slot
        self._body = ipywidgets.HTML()
        self._stop = clicks.stop_button(stop)
        self._stop.add_class("na-stop")
        self._filter = _rank_filter(world_size, choose)
        clicks.let_through(self._filter)
        self._style = ipywidgets.HTML(
            str(style_element()), layout=ipywidgets.Layout(display="none")
        )
        self._box = ipywidgets.VBox([self._style, self._body, self._stop, self._filter])
        self._box.add_class("na-panel")
        self._name = name

    def show(self) -> None:
        """Display the panel in the cell that runs now."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        text = f"{self._name}: a live view, which needs its kernel"
        self._slot.show({_WIDGET_VIEW: view, "text/plain": text})

    def draw(self, markup: str) -> None:
        """Show ``markup``; a page is only told of what changed."""
        self._body.value = markup

    def stopping(self) -> None:
        """Show that a stop was asked for."""
        self._stop.description = "Stopping"
        self._stop.disabled = True

    def finish(self, snapshot: Snapshot) -> None:
        """Leave the summary in place of the live panel."""
        # A page that was reloaded has forgotten the id, and still shows the widget.
        self._body.value = str(snapshot.html)
        self._box.children = (self._body,)
        self._slot.show(snapshot.bundle)
        # A page that connects asks for the state of every widget that there is.
        for widget in (self._style, self._stop, self._filter):
            for part in (widget.layout, widget.style, widget):
                part.close()

    def finish_again(self, snapshot: Snapshot) -> None:
        """Send the end once more."""
        self._body.send_state()
        self._slot.show(snapshot.bundle)


def _rank_filter(world_size: int, choose: Callable[[int | None], None]) -> Any:
    # The value None would mean that nothing is chosen, and show as an empty field.
    options = [("all ranks", _ALL_RANKS), *((f"rank {rank}", rank) for rank in range(world_size))]
    widget = ipywidgets.Dropdown(
        options=options, layout=ipywidgets.Layout(width="116px"), tooltip="Whose output is shown"
    )
    widget.add_class("na-filter")

    def changed(change: Any) -> None:
        rank = change["new"]
        choose(None if rank == _ALL_RANKS else rank)

    widget.observe(changed, names="value")
    return widget


class Dashboard(View):
    """Live panels of one run.

    All drawing is done under one lock, by the thread that the cell blocks while it waits, else
    by a thread of its own. Clicks change nothing on the page by themselves.
    """

    def __init__(self, clicks: ClicksAfterTheCell) -> None:
        self._clicks = clicks
        self._panels: list[Panel] = []
        self._lock = threading.RLock()
        self._has_changed = False
        self._has_ended = False
        self._asked_stop = False
        self._run: Run | None = None
        self._state: RunState | None = None
        self._snapshot: Snapshot | None = None
        self._chosen: int | None = None
        self._throughput = Throughput()
        self._curves: dict[str, deque[float]] = {}
        self._drawn_at = 0.0
        self._expected: tuple[str, DisplaySlot] | None = None

    # ---- what the run calls ----

    def expect(self, name: str) -> None:
        self._expected = name, DisplaySlot()
        self._expected[1].show(
            render_line(f"{name}: starting, which takes some seconds the first time").bundle
        )

    def abandon(self) -> None:
        if self._expected is not None:
            name, slot = self._expected
            slot.show(render_line(f"{name}: not started").bundle)

    def open(self, run: Run) -> None:
        self._run = run
        self._state = run.state
        # ipykernel 7.0 finds the cell of a thread by its context alone.
        context = contextvars.copy_context()
        self._add_panel(run.state)
        threading.Thread(
            target=context.run, args=(self._keep_drawing,), name="notebook-accel-panel", daemon=True
        ).start()

    def update(self, state: RunState) -> None:
        with self._lock:
            self._state = state
            self._has_changed = True
            self._throughput.note(state, now=time.monotonic())
            self._note_metrics(state)

    def poll(self) -> None:
        self._clicks.pump()
        self._draw()

    def close(self, state: RunState) -> None:
        with self._lock:
            self._state = state
            self._finish()

    def reopen(self, run: Run) -> None:
        with self._lock:
            if self._snapshot is not None:
                DisplaySlot().show(self._snapshot.bundle)
            elif self._state is not None:
                self._add_panel(self._state)

    # ---- drawing ----

    def _add_panel(self, state: RunState) -> None:
        slot = self._expected[1] if self._expected is not None else DisplaySlot()
        self._expected = None
        panel = Panel(
            state.name,
            state.world_size,
            slot=slot,
            clicks=self._clicks,
            stop=self._ask_stop,
            choose=self._choose,
        )
        panel.draw(self._markup(state))
        panel.show()
        self._panels.append(panel)

    def _keep_drawing(self) -> None:
        # No event wakes it: an interrupt in the cell's thread could leave one locked for good.
        while not self._has_ended:
            time.sleep(_DRAW_SECONDS / 2)
            self._draw()
        self._send_again()

    def _draw(self) -> None:
        """Draw what is known now, where it changed or the clock moves on."""
        with self._lock:
            now = time.monotonic()
            wait = _DRAW_SECONDS if self._has_changed else _CLOCK_SECONDS
            if self._state is None or self._has_ended or now < self._drawn_at + wait:
                return
            self._drawn_at = now
            self._has_changed = False
            markup = self._markup(self._state)
            for panel in self._panels:
                panel.draw(markup)
                if self._state.status == "stopping":
                    panel.stopping()

    def _markup(self, state: RunState) -> str:
        paces = {rank.rank: self._throughput.of(rank.rank) for rank in state.ranks}
        details = Details(now=state.now(), paces=paces, chosen=self._chosen, curves=self._curves)
        return str(render_panel(state, details))

    def _note_metrics(self, state: RunState) -> None:
        for name, by_rank in last_values(state).items():
            curve = self._curves.setdefault(name, deque(maxlen=_MAX_CURVE))
            value = next(iter(by_rank.values()))
            if not curve or curve[-1] != value:
                curve.append(value)

    def _finish(self) -> None:
        if self._state is None or self._run is None or self._has_ended:
            return
        self._has_ended = True
        self._snapshot = render_snapshot(self._state, self._run.sample_metrics())
        for panel in self._panels:
            panel.finish(self._snapshot)

    def _send_again(self) -> None:
        ended = time.monotonic()
        for seconds in _AGAIN_SECONDS:
            time.sleep(max(0.0, ended + seconds - time.monotonic()))
            with self._lock:
                for panel in self._panels:
                    if self._snapshot is not None:
                        panel.finish_again(self._snapshot)

    # ---- clicks ----

    def _ask_stop(self) -> None:
        # A second stop would interrupt the ranks, and many people click twice.
        if self._run is not None and not self._asked_stop:
            self._asked_stop = True
            self._run.stop()
            self._has_changed = True

    def _choose(self, rank: int | None) -> None:
        self._chosen = rank
        self._has_changed = True
