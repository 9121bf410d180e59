"""How a run is shown in a notebook: a live panel, then a summary; plain lines for programs."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from notebook_accel.config.checks import shown
from notebook_accel.errors import ConfigError
from notebook_accel.launch import run_list
from notebook_accel.launch.control.run_state import RunState
from notebook_accel.launch.run import Run
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.view import GuardedView, View
from notebook_accel.launch.view.plain import PlainOnDemand, PlainView
from notebook_accel.notebook import clicks
from notebook_accel.notebook.clicks import ClicksAfterTheCell
from notebook_accel.notebook.comparison import snapshot_of
from notebook_accel.notebook.display_slot import DisplaySlot, start_thread
from notebook_accel.notebook.rank_displays import OnDemand, RankDisplays
from notebook_accel.render.snapshot import render_line, render_slim

if TYPE_CHECKING:
    from notebook_accel.notebook.live_panel import LivePanel, PanelBox

# A page keeps up with 20 KB five times a second; 200 KB ten times a second came seconds late.
_DRAW_SECONDS = 0.2
# Where nothing has changed, only the time that has passed is drawn.
_CLOCK_SECONDS = 1.0
# A server that drops messages of a flood drops the last one too, until the end of the cell resets
# what it has counted: the end is sent again this much later. Only once, and before anybody can have
# opened a fold: a page draws the summary anew, with its folds closed.
_AGAIN_SECONDS = 0.3
# To make the widgets of a panel, and to close them, takes as long as two ranks need for a short
# function: a run that ends before has none, and costs its cell no more than its summary.
_PANEL_SECONDS = 0.5
# A cell that ends before looks like any other cell.
_SLIM_SECONDS = 1.0


class Dashboard(OnDemand):
    """The live view of one run: in the cell that launched it and where ``run.show()`` is called.

    A run begins as one line and gets a panel of widgets once it has lasted for half a second (a
    cell: one second). Two threads draw it under one lock: a thread of the view, and the cell's
    thread while the cell waits for the run. A click draws nothing itself.

    Args:
        waits: if False, ranks' displays go into the panel: an ended cell gets no more output.
        is_cell: a ``%%accelerate`` cell; too short for a panel, it gets one line, no summary.
        slot: where the panel is shown; None for the output of the cell that opens the view.
    """

    is_shown = True

    def __init__(
        self,
        clicks: ClicksAfterTheCell,
        *,
        waits: bool = True,
        is_cell: bool = False,
        slot: DisplaySlot | None = None,
    ) -> None:
        self._clicks = clicks
        self._waits = waits
        self._is_cell = is_cell
        self._panel_seconds = _SLIM_SECONDS if is_cell else _PANEL_SECONDS
        self._slot = DisplaySlot() if slot is None else slot
        self._has_own_slot = slot is None
        self.panel: LivePanel | None = None
        # What it fills, which may be shown before.
        self._lasting: PanelBox | None = None
        self._lock = threading.RLock()
        self._is_drawing = False
        self._has_changed = False
        self._has_ended = False
        self._run: Run | None = None
        self._slow_launch = ""
        self._displays = RankDisplays()
        self._opened_at = 0.0
        self._drawn_at = 0.0

    # ---- what the run calls ----------------------------------------------------------------

    def launch_is_slow(self, name: str, importing: str = "") -> None:
        self._slow_launch = name
        what = f"importing {importing}" if importing else "starting"
        text = f"{name}: {what}, which takes some seconds the first time"
        # Before the page has the widget, which it may ask for at once.
        self._clicks.pump()
        # A page that is reloaded now asks for widgets alone.
        is_new = self._lasting is None
        self._lasting = self._lasting or self._box()
        self._lasting.body.value = render_line(text)["text/html"]
        if is_new:
            self._lasting.show(text)

    def _box(self) -> PanelBox:
        # With the first panel: ipywidgets is a third of what the launcher's import would take.
        from notebook_accel.notebook.live_panel import PanelBox

        return PanelBox(self._slot)

    def waits_for_machines(self, text: str) -> None:
        with self._lock:
            self._slow_launch = text.partition(":")[0]
            if self.panel is None:  # which shows it among the notices
                self._slot.show(render_line(text))

    def launch_failed(self) -> None:
        self._clicks.stop_pumping()
        if self._slow_launch:
            self._slot.show(render_line(f"{self._slow_launch}: not started"))
        if self._lasting is not None:
            self._lasting.close()

    def open(self, run: Run) -> None:
        self._run = run
        self._opened_at = time.monotonic()
        if not self._waits:
            self._clicks.stop_pumping()
        # A cell is drawn once it is waited for: most end before, and cost a single message.
        if not (self._is_cell and self._waits):
            self._begin_drawing()

    def _begin_drawing(self) -> None:
        assert self._run is not None, "a view that draws is open"
        self._is_drawing = True
        state = self._run.state
        # What says "starting" already stays until the panel comes: another line is a jump.
        if self._lasting is None:
            self._slot.show(render_slim(state, now=state.now()))
        start_thread(self._keep_drawing, name="notebook-accel-panel")

    def update(self, state: RunState) -> None:
        with self._lock:
            self._has_changed = True
            if self.panel is not None:
                self.panel.read(state)

    def poll(self) -> None:
        self._clicks.pump()
        with self._lock:
            if not self._is_drawing and not self._has_ended and self._run is not None:
                self._begin_drawing()
        self.draw()
        self._show_new_displays()

    def stop_waiting(self) -> None:
        self._clicks.stop_pumping()

    def print_end(self) -> None:
        if not self._slot.is_placed:
            self._slot.place()
        self._show_new_displays()

    def close(self, state: RunState) -> None:
        with self._lock:
            if self._run is None or self._has_ended:
                return
            self._has_ended, self._slot.is_live = True, False
            if self.panel is not None:
                self.asked_stacks = self.panel.asked_stacks
            elif self._is_cell:
                self._slot.show(render_slim(state), is_to_place=False)
                return
            summary = snapshot_of(
                self._run, state, with_displays=not self._waits, asked_stacks=self.asked_stacks
            )
            if self._lasting is None:
                self._slot.show(summary)
            else:
                typed = f"{run_list.expression(self._run.id)}.show()"
                self._lasting.finish(summary, typed)
            if self.panel is not None:
                self.panel.close()

    def give_up(self) -> None:
        """Show the run no longer, and leave the slot to another one."""
        with self._lock:
            self._has_ended, self._slot.is_live = True, False
            if self.panel is not None:
                self.panel.close()
            if self._lasting is not None:
                self._lasting.close()
                self._lasting = None
            self._slot.clear()

    def reopen(self, run: Run) -> None:
        with self._lock:
            if self._has_ended:
                super().reopen(run)
            else:
                # Not one more panel: each would be drawn, and sent, five times a second.
                self._slot.place()

    # ---- drawing ---------------------------------------------------------------------------

    def _make_panel(self, run: Run) -> None:
        from notebook_accel.notebook.live_panel import LivePanel

        self._lasting = self._lasting or self._box()
        lasting, clicks = self._lasting, self._clicks

        def below() -> View:
            slot = lasting.place_below()
            return Dashboard(type(clicks)(clicks.kernel), waits=False, slot=slot)

        panel = LivePanel(run, lasting=lasting, clicks=clicks, below=below)
        panel.read(run.state)
        panel.draw(run.state)
        panel.show(
            f"{run.state.name} (run {run.id}): a live panel, which only its kernel draws. "
            f"{run_list.expression(run.id)}.show() draws it again; after a restart of the kernel "
            "it shows what was kept."
        )
        self.panel = panel

    def _keep_drawing(self) -> None:
        guarded = GuardedView(self)
        # No event wakes it: an interrupt in the cell's thread could leave one locked for good.
        while not self._has_ended:
            time.sleep(_DRAW_SECONDS / 2)
            guarded.guard(self.draw)
        time.sleep(_AGAIN_SECONDS)
        guarded.guard((self._lasting or self._slot).send_again)

    def draw(self) -> None:
        """Draw what changed, at most five times a second; any thread may call this often."""
        with self._lock:
            now = time.monotonic()
            wait = _DRAW_SECONDS if self._has_changed else _CLOCK_SECONDS
            if self._run is None or self._has_ended or now < self._drawn_at + wait:
                return
            state = self._run.state
            if self.panel is None:
                if now >= self._opened_at + self._panel_seconds:
                    self._make_panel(self._run)
                return
            # What changes while it is drawn, by a click, is drawn next time.
            self._has_changed = False
            if self.panel.draw(state):
                self._has_changed = True
            if not self._waits:
                self.panel.draw_displays(state)
            # From the end: on a busy machine drawing itself takes long, and the next messages
            # would follow the last ones at once.
            self._drawn_at = time.monotonic()

    def _show_new_displays(self) -> None:
        """Only the thread of the waiting cell may call this."""
        if self._waits and self._run is not None:
            self._displays.show_new(self._run.state)


# ---- A run in a notebook that a program executes: plain lines, and the summary as HTML.


class Transcript(OnDemand, PlainView):
    """Prints lines as :class:`PlainView` does, and shows the summary as HTML, without widgets.

    For notebooks that a program executes, and for ``view="text"``. If the cell does not wait, the
    summary has a slot in its output from the start, with the ranks' output and displays.
    """

    def __init__(self, *, waits: bool = True, is_cell: bool = False) -> None:
        super().__init__(is_cell=is_cell)
        self._slot = DisplaySlot()
        self._displays = RankDisplays()
        self._waits = waits

    def open(self, run: Run) -> None:
        super().open(run)
        if not self._waits:
            self._slot.show({"text/plain": f"{run.name}: running"})

    def close(self, state: RunState) -> None:
        if self._run is not None and not self._waits:
            self._slot.show(snapshot_of(self._run, state, with_displays=True))

    def poll(self) -> None:
        super().poll()
        if self._run is not None and self._waits:
            self._displays.show_new(self._run.state)

    def print_output(self, run: Run, state: RunState) -> None:
        if self._waits:
            super().print_output(run, state)

    def print_summary(self, run: Run) -> None:
        if not self._waits:
            return
        if self.is_short_cell(run):
            snapshot = render_slim(run.state, with_output=False)
        else:
            snapshot = snapshot_of(run, run.state, with_output=False)
        self._displays.show_new(run.state)
        self._slot.show(snapshot)


# ---- The view of a run where pages draw nothing between cells (Colab).


class CellDashboard(Dashboard):
    """A :class:`Dashboard` for Colab, whose pages draw nothing that is sent while no cell runs.

    The thread of a cell that waits draws it, into that cell's output; until then it is one line.
    """

    # The number of the newest cell that shows the run.
    _placed_in: int | None = None

    def _begin_drawing(self) -> None:
        assert self._run is not None, "a view that draws is open"
        self._is_drawing = True
        # A click has no cell.
        self._placed_in = _number_of_cell() if self._has_own_slot else None
        name = one_line(self._run.state.name, 60)
        typed = run_list.expression(self._run.id)
        text = (
            f"{name}: running"
            if self._waits
            else f"{name}: runs in the background. {typed}.wait() in a cell shows it live, "
            ".show() how it stands then"
        )
        self._slot.show(render_line(text))

    def draw(self) -> None:
        self._place_in_cell()
        super().draw()

    def print_end(self) -> None:
        self._place_in_cell()
        # What another thread has sent may come after the end of this cell.
        self._slot.send_again()
        super().print_end()

    def _place_in_cell(self) -> None:
        if self._placed_in != _number_of_cell():
            self._placed_in = _number_of_cell()
            self._slot.place()


def _number_of_cell() -> int | None:
    number: int | None = getattr(get_ipython(), "execution_count", None)
    return number


# ---- The views by their names.


def dashboard_in(
    kernel: Any, *, waits: bool = True, is_cell: bool = False, slot: DisplaySlot | None = None
) -> Dashboard:
    """Return the live panel that works in the pages of ``kernel``."""
    way = clicks.clicks_for(kernel)
    kind = Dashboard if way.draws_between_cells else CellDashboard
    return kind(way, waits=waits, is_cell=is_cell, slot=slot)


def choose_view(view: str | View, *, waits: bool = True, is_cell: bool = False) -> View:
    """Make the view for this kernel or terminal; ConfigError if it cannot be shown here.

    ``view`` is a name that ``notebook_launcher`` takes, or a view that is made already.
    """
    if isinstance(view, View):
        return view
    kernel = clicks.find_kernel()
    draws_updates = clicks.draws_updates(kernel)
    if view == "auto" or (view == "widgets" and not draws_updates):
        is_watched = kernel is not None and clicks.can_answer(kernel) and draws_updates
        view = "widgets" if is_watched else "text"
    if view == "none":
        return PlainOnDemand() if kernel is None else OnDemand()
    if view == "text" and kernel is None:
        return PlainView(is_cell=is_cell)
    if view == "text":
        # Where no updates are drawn, the cell that waits for a background run has its output.
        return Transcript(waits=waits or not draws_updates, is_cell=is_cell)
    if view != "widgets":
        raise ConfigError(f"view={shown(view)}: expected one of 'auto', 'widgets', 'text', 'none'")
    if kernel is None:
        raise ConfigError(
            "view='widgets': this code does not run in a notebook's kernel, which widgets need; "
            "take view='text'"
        )
    return dashboard_in(kernel, waits=waits, is_cell=is_cell)
