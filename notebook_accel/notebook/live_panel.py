"""The widgets of one live panel, and what is left of them at the end of its run.

One HTML widget holds the whole panel, its log aside, since a page keeps up with one message five
times a second but not with one a bar. Widget values may be set from any thread; printing and
displaying may not: the output would go to whatever cell ran last. So the cell displays the panel
once, in a slot, and the end of the run replaces it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets

from notebook_accel.notebook.log_view import LogView, close_widget
from notebook_accel.notebook.style import style_element

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accel.launch.control.state import RunState
    from notebook_accel.notebook.clicks import ClicksAfterTheCell
    from notebook_accel.notebook.display_slot import DisplaySlot
    from notebook_accel.notebook.snapshot import Snapshot

__all__ = ["LivePanel"]

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class LivePanel:
    """The widgets of one panel.

    Args:
        state: the run's state.
        slot: where in a cell's output it goes.
        clicks: how clicks get through.
        stop: called when Stop is clicked.
    """

    def __init__(
        self,
        state: RunState,
        *,
        slot: DisplaySlot,
        clicks: ClicksAfterTheCell,
        stop: Callable[[], None],
    ) -> None:
        self._slot = slot
        self._body = ipywidgets.HTML()
        self._stop = clicks.stop_button(stop)
        self._stop.add_class("na-stop")
        self._log = LogView(state, clicks)
        self._style = ipywidgets.HTML(
            str(style_element()), layout=ipywidgets.Layout(display="none")
        )
        # Stop comes first for the keyboard too.
        self._box = ipywidgets.VBox([self._style, self._stop, self._body, self._log.box])
        self._box.add_class("na-panel")

    def show(self, text: str) -> None:
        """Display the panel; ``text`` is what a saved file has of it, should it come to no end."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        self._slot.show({_WIDGET_VIEW: view, "text/plain": text})

    def read(self, state: RunState) -> None:
        """Take what ranks printed since the last call."""
        self._log.read(state)

    def draw(self, state: RunState, markup: str) -> bool:
        """Show ``markup`` above the log; True where more of the log waits.

        A page is only told of what changed.
        """
        self._body.value = markup
        if state.status == "stopping":
            self._stop.description = "Stopping"
            self._stop.disabled = True
        return self._log.draw(state)

    def finish(self, snapshot: Snapshot) -> None:
        """Leave the summary in place of the live panel."""
        # A page that was reloaded has forgotten the slot, and still shows the widget.
        self._body.value = snapshot.bundle["text/html"]
        self._box.children = (self._body,)
        self._slot.show(snapshot.bundle)
        self._log.close()
        close_widget(self._style)
        close_widget(self._stop)

    def finish_again(self, snapshot: Snapshot) -> None:
        """Send the end once more, to a page that may not have got it."""
        self._body.send_state()
        self._slot.show(snapshot.bundle)
