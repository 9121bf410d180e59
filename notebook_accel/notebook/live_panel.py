"""The widgets of one run's live panel, and the summary that replaces them when the run ends.

    buttons | title | ranks | note (stacks, folder) | knobs | metrics | log | displays

One HTML widget holds all ranks: a page keeps up with one message five times a second, but not with
one for each bar. Widget values may be set from any thread. Printing and displaying may not, since
the output would go to the cell that ran last. So the cell displays the panel once, in a slot, and
at the end of the run the summary replaces it in that slot.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ipywidgets
from markupsafe import Markup

from notebook_accel.launch import run_list
from notebook_accel.launch.control.run_state import Display, Hang, RunState
from notebook_accel.launch.run import Run, call_of
from notebook_accel.launch.text import wording
from notebook_accel.launch.view.progress import Throughput
from notebook_accel.launch.view.summary import hang_line
from notebook_accel.notebook import display_slot
from notebook_accel.notebook.clicks import ClicksAfterTheCell
from notebook_accel.notebook.comparison import original_of
from notebook_accel.notebook.controls import CloneForm, Controls, cloneable
from notebook_accel.notebook.log_view import LogView
from notebook_accel.notebook.metrics_view import MetricsView
from notebook_accel.notebook.rank_displays import seconds_to_wait
from notebook_accel.notebook.widgets import PanelWidgets
from notebook_accel.render import panel
from notebook_accel.render.markup import copyable, element, file_link, style_element
from notebook_accel.render.snapshot import first_asked, render_displays

_STOP_TOOLTIP = (
    "Stop all ranks at the same step. What is being trained is kept (last_run().rescued), or what "
    "the function returns, if it reads should_stop. The kernel's own Interrupt ends them as well."
)
_KILL_TOOLTIP = "End all ranks at once, with the processes that they started. Results are lost."
_STACKS_TOOLTIP = "Show which line each rank executes now"
_FOLDER_TOOLTIP = "Show the folder that has the whole output of each rank"
_TITLE_SECONDS = 1.0
# So long after a click on Kill another one is part of it, since many people click twice; from then
# on the button asks whether one is sure, and so long it waits for the answer.
_DOUBLE_CLICK_SECONDS = 0.6
_SURE_SECONDS = 4.0
# A page keeps what a link holds in its memory, and a Jupyter server drops messages of 3 MB.
_MAX_LINK_BYTES = 2_000_000
# A summary that is a widget outlives its kernel: Jupyter would draw broken links before it then.
_ENDED_STYLE = (
    "<style>.na-ended.jupyter-widgets-disconnected::before, "
    ".na-ended .jupyter-widgets-disconnected::before { display: none; }</style>"
)
# Only a page that was reloaded shows the widget then: in the others the summary has its place.
_ENDED_NOTE = (
    "The page was reloaded meanwhile, so only the kernel has this summary: {show} in a cell puts "
    "it into the notebook."
)
_COMES_NOTE = (
    "The page was reloaded meanwhile, so only the kernel has this summary: the next cell that runs "
    "puts it into the notebook."
)
# Summaries that stay widgets, and the characters of them all; older ones are shown by run.show().
_MAX_ENDED = 10
_MAX_ENDED_SIZE = 2_000_000

_ended: deque[PanelBox] = deque()
# Runs may end in several threads at once.
_ended_lock = threading.Lock()


class _Box(ipywidgets.VBox):  # type: ignore[misc]
    """A box that notes whether a page has asked for it that did not see it made."""

    was_asked = False

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
        self.was_asked = self.was_asked or (key is None and self.comm is not None)
        return super().get_state(key, drop_defaults)


class PanelBox:
    """The widget in which a run is shown from before it begins until after it has ended.

    A reloaded page forgets the slots of cells, but asks for widgets.
    """

    def __init__(self, slot: display_slot.DisplaySlot) -> None:
        self._slot = slot
        self._below: list[display_slot.WidgetSlot] = []
        self._last: tuple[Mapping[str, str], str] | None = None
        self._lock = threading.RLock()
        self._widgets = PanelWidgets()
        self.body = self._widgets.make(ipywidgets.HTML, classes="na-body")
        self.box = self._widgets.make(_Box, [self.body])

    def show(self, text: str) -> None:
        """Display the box; ``text`` stands in the saved notebook until the summary replaces it."""
        self._slot.show(display_slot.widget_view(self.box, text))

    def close(self) -> None:
        self._widgets.close()

    def place_below(self) -> display_slot.WidgetSlot:
        """Return a new place for a clone of the run, at the end of the box."""
        slot = display_slot.WidgetSlot(
            self._widgets.make(ipywidgets.Output, classes="na-below"), self._settle
        )
        with self._lock:
            self._below.append(slot)
            self.box.children = (*self.box.children, slot.output)
        return slot

    def finish(self, bundle: Mapping[str, str], show: str) -> None:
        """Show the summary, also in a page that was reloaded; ``show`` is code that shows it."""
        with self._lock:
            self._last = bundle, show
            self._settle()
            if self._last is not None:  # clones go on: what a saved notebook says until then
                self._slot.show(display_slot.widget_view(self.box, bundle["text/plain"]))

    def _settle(self) -> None:
        """Once the run has ended show its summary: above its clones, until they have ended too."""
        with self._lock:
            if self._last is None:
                return
            bundle, show = self._last
            note, outputs = "", [slot.output for slot in self._below]
            if not any(
                slot.is_live or display_slot.WIDGET_VIEW in slot.bundle for slot in self._below
            ):
                self._last, outputs, note = None, [], _ENDED_NOTE.format(show=show)
                bundles = [bundle, *(slot.bundle for slot in self._below)]
                text = "\n".join(filter(None, (one["text/plain"] for one in bundles)))
                bundle = {"text/plain": text, "text/html": "".join(b["text/html"] for b in bundles)}
                # First, and by one message: what follows would be seen as a panel that jumps.
                self._slot.show(bundle)
                if self.box.was_asked:
                    note = _COMES_NOTE
                    self._slot.show_in_next_page(bundle)
            # A page that was reloaded has forgotten the slot, and still shows the widget. It has a
            # class of its own: the style sheet of another panel in the page is not meant for it.
            self.box.children = (self.body, *outputs)
            self.box.remove_class("na-panel")
            self.box.add_class("na-ended")
            html = element("div", note, style="opacity:.65;font-size:13px")
            self.body.value = f"{_ENDED_STYLE}{bundle['text/html']}{html}"
            if note:
                self._keep()

    def _keep(self) -> None:
        # Not closed with the others, for pages that were reloaded; but each page that connects
        # asks for the state of every widget there is.
        with _ended_lock:
            _ended.append(self)
            size = sum(len(each.body.value) for each in _ended)
            while len(_ended) > _MAX_ENDED or size > _MAX_ENDED_SIZE:
                oldest = _ended.popleft()
                size -= len(oldest.body.value)
                oldest.close()

    def send_again(self) -> None:
        self.body.send_state()
        # Another run may have got the slot meanwhile: what it shows is sent, whosever that is.
        self._slot.send_again()


class LivePanel:
    """The widgets that show one run while it goes on.

    A click may come from another thread. ``log`` has the output and the picked rank;
    ``asked_stacks`` is a title and (ranks, stack) pairs, None before a click.
    """

    def __init__(
        self, run: Run, *, lasting: PanelBox, clicks: ClicksAfterTheCell, below: Callable[[], Any]
    ) -> None:
        self._run = run
        self._lasting = lasting
        self.box = lasting.box
        self._throughput = Throughput()
        self._stopping_since: float | None = None
        self._was_stopped_again = False
        self._hang: Hang | None = None
        self._last_hang = ""
        self._kill_asked = -math.inf
        self._titled, self._titled_at = "", 0.0
        self.asked_stacks: panel.AskedStacks | None = None
        self._drawn_displays: tuple[Display, ...] = ()
        self._displays_due = 0.0
        self._widgets = widgets = PanelWidgets(clicks)
        # Its own body: a page that shows the box would draw the table in the other one at once,
        # and the rest of the panel when it has made all widgets.
        self._title, self._body, self._warnings, self._note, self._alert, self._displays = (
            widgets.make(ipywidgets.HTML, classes=classes)
            for classes in ("na-head", "na-body", "", "na-note", "na-alert", "")
        )
        buttons = [
            widgets.button(
                "Stop", f"{_STOP_TOOLTIP} {clicks.tooltip}".rstrip(), self._on_stop, "na-stop"
            ),
            widgets.button("Kill", _KILL_TOOLTIP, self._on_kill, "na-small-button na-kill"),
            # It takes up to some seconds, in which the panel goes on.
            widgets.button(
                "Stacks",
                _STACKS_TOOLTIP,
                lambda: display_slot.start_thread(self._fetch_stacks, name="notebook-accel-stacks"),
            ),
            widgets.button("Log folder", _FOLDER_TOOLTIP, self._on_folder),
        ]
        self._stop, self._kill = buttons[:2]
        self._controls = Controls(run, widgets)
        find = partial(cloneable, run, below)
        # A trial of a sweep is cloned there, as one more trial.
        can_clone = run.state.trial is None and find() is not None
        forms = [CloneForm(widgets, find, self._controls.say)] if can_clone else []
        buttons[1:1] = [*self._controls.buttons, *(form.button for form in forms)]
        advice = element("div", clicks.advice, class_="na na-muted na-advice")
        self._advice = [widgets.make(ipywidgets.HTML, str(advice))] if clicks.advice else []
        self._metrics = MetricsView(widgets, call_of(run).metrics.sample, original_of(run))
        self.log = LogView(run.state, widgets, saved=self._saved_log)
        # Text that the style sheet shows once the kernel is gone, which can send none then.
        gone = element(
            "div",
            "The kernel of this run is gone. This shows what was kept: ",
            copyable("code", f"{run_list.expression(run.id)}.show()"),
            class_="na",
        )
        # Stop comes first for the keyboard.
        self._parts = (
            widgets.make(
                ipywidgets.HTML,
                f"{style_element()}{style_element('charts')}{gone}",
                classes="na-gone",
            ),
            widgets.make(ipywidgets.HBox, buttons, classes="na-buttons"),
            self._title,
            *self._advice,
            self._body,
            # Apart, so that it stays open while the rest is drawn.
            self._warnings,
            self._note,
            self._controls.box,
            *(form.box for form in forms),
            widgets.make(
                ipywidgets.VBox, [self._metrics.box, self.log.box], classes="na-metrics-and-log"
            ),
            self._displays,
            self._alert,
        )

    def show(self, text: str) -> None:
        self.box.add_class("na-panel")
        self.box.children = self._parts
        self._lasting.show(text)

    def read(self, state: RunState) -> None:
        """Take each state of the run, of which only some are drawn."""
        if state.status == "stopping" and self._stopping_since is None:
            self._stopping_since = time.monotonic()
        self._throughput.note(state, now=time.monotonic())
        self.log.read(state)

    def draw(self, state: RunState) -> bool:
        """Send what changed to the page; return True if a part of the log is still to be sent."""
        now = time.monotonic()
        if state.hang is not None:
            self._last_hang = hang_line(state)
        # The rate in the title changes all the time, and is a message of its own.
        if state.status != self._titled or now >= self._titled_at + _TITLE_SECONDS:
            self._titled, self._titled_at = state.status, now
            of_run = self._throughput.of_run(state)
            self._title.value = str(panel.render_title(state, state.now(), of_run))
        stopping = 0.0 if self._stopping_since is None else now - self._stopping_since
        self._body.value = str(
            panel.render_panel(
                state,
                {rank.rank: self._throughput.of(rank.rank) for rank in state.ranks},
                last_hang=self._last_hang,
                picked=self.log.chosen,
                stopping=stopping,
                grace=self._run.config.grace,
            )
        )
        self._warnings.value = str(element("div", panel.render_warnings(state), class_="na"))
        self._alert.value = str(panel.render_alert(state))
        if state.status == "stopping":
            self._stop.disabled = self._was_stopped_again or stopping <= panel.STOP_SECONDS
            self._stop.description = "Stopping" if self._stop.disabled else "Stop"
        self._kill.description = "Sure?" if self._asks_whether_sure(now) else "Kill"
        self._controls.draw(state)
        # Once a hang is over its stacks stay, as what is said of it does.
        if state.hang is not None and state.hang is not self._hang:
            self._hang = state.hang
            self._show_stacks("stacks of the ranks", state.hang.stacks, is_open=False)
        curves = call_of(self._run).curves
        if curves is not None:
            self._metrics.draw(curves, now=now)
        return self.log.draw(state)

    def draw_displays(self, state: RunState) -> None:
        """For a run in the background; any other run's displays are outputs of its cell."""
        displays = first_asked(state).displays
        now = time.monotonic()
        if displays is self._drawn_displays or now < self._displays_due:
            return
        # The second class is that of JupyterLab's own outputs: tables look as they do there.
        html = element("div", render_displays(state), class_="na-displays jp-RenderedHTMLCommon")
        self._drawn_displays = displays
        # Each time that there is more of it, all of it is sent.
        self._displays_due = now + seconds_to_wait(len(html))
        self._displays.value = str(html)

    def _asks_whether_sure(self, now: float) -> bool:
        return _DOUBLE_CLICK_SECONDS <= now - self._kill_asked < _SURE_SECONDS

    def _show_stacks(
        self, title: str, stacks: Sequence[tuple[Sequence[int], str]], *, is_open: bool
    ) -> None:
        fold = panel.fold_of_stacks(title, stacks, is_open=is_open)
        self._note.value = str(element("div", fold, class_="na na-stacks"))

    def close(self) -> None:
        self._widgets.close()

    # ---- clicks ----------------------------------------------------------------------------

    def _on_stop(self) -> None:
        # A second stop interrupts the ranks, and many people click twice: it is offered later.
        if not self._stop.disabled:
            self._was_stopped_again = self._stopping_since is not None
            self._stop.disabled = True
            self._run.stop()

    def _on_kill(self) -> None:
        now = time.monotonic()
        # Results are lost by it: a slip of the hand must not be enough.
        if self._asks_whether_sure(now):
            self._run.kill()
        elif now >= self._kill_asked + _SURE_SECONDS:
            self._kill_asked = now

    def _fetch_stacks(self) -> None:
        said, *parts = re.split(r"^rank (\d+)\n", self._run.stacks(), flags=re.MULTILINE)
        # Where no rank tells its stack, the text says why.
        alike = {} if parts else {said: [*range(self._run.world_size)]}
        for rank, text in zip(parts[::2], parts[1::2], strict=True):
            # The number of a thread is another one in each process.
            alike.setdefault(re.sub(" 0x[0-9a-f]+", "", text.strip()), []).append(int(rank))
        state = self._run.state
        if not state.has_ended:
            title = f"stacks after {wording.clock(state.now() - state.started)}"
            self.asked_stacks = title, [(ranks, text) for text, ranks in alike.items()]
            self._show_stacks(*self.asked_stacks, is_open=True)

    def _on_folder(self) -> None:
        path = copyable("code", str(self._run.log_dir))
        self._note.value = str(element("div", "log folder ", path, class_="na na-folder"))

    def _saved_log(self, rank: int | None) -> Markup:
        """Return a link with the output as a file (the end of a long one), or why there is none."""
        who = "all ranks" if rank is None else f"rank {rank}"
        ranks = range(self._run.world_size) if rank is None else [rank]
        parts = [self._run.state.ranks[number] for number in ranks]
        size = sum(part.log_end - (part.log_start or 0) for part in parts)
        is_whole = size <= _MAX_LINK_BYTES
        try:
            text = call_of(self._run).logs(rank, None if is_whole else _MAX_LINK_BYTES)
        except FileNotFoundError as error:
            return element("span", str(error), class_="na-muted")
        data = text.encode(errors="replace")
        if len(data) > _MAX_LINK_BYTES:  # with the label of each line
            data, is_whole = data[-_MAX_LINK_BYTES:].partition(b"\n")[2], False
        part = _size(len(data)) if is_whole else f"last {_size(len(data))} of {_size(size)}"
        name = f"{self._run.id}-{who.replace(' ', '-')}.txt"
        about = None if is_whole else f"All of it is in {self._run.log_dir}"
        return file_link(f"{who}, {part}", name, data, "text/plain", title=about)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1000:,.0f} KB" if num_bytes >= 1000 else f"{num_bytes} bytes"
