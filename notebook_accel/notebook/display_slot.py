"""One slot in a cell's output, whose contents any thread can replace later."""

from __future__ import annotations

import contextvars
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display, update_display

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# It takes no room in the pages of JupyterLab and Notebook 7.
_NOTHING = {"text/plain": "", "text/html": ""}


def widget_view(widget: Any, text: str) -> dict[str, Any]:
    """Return the MIME bundle that displays ``widget``; a saved notebook shows ``text`` instead."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {WIDGET_VIEW: view, "text/plain": text}


def start_thread(act: Callable[[], None], *, name: str) -> threading.Thread:
    """Start a daemon thread in a copy of the context, by which ipykernel 7.0 knows its cell."""
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(act,), name=name, daemon=True)
    thread.start()
    return thread


class DisplaySlot:
    """A place in a cell's output whose contents, MIME bundles, any thread can replace."""

    def __init__(self) -> None:
        self._id = f"notebook-accel-{uuid.uuid4().hex}"
        self.bundle: Mapping[str, Any] = _NOTHING
        self.is_placed = False
        # Whether what is shown there goes on.
        self.is_live = True
        # The header of the cell's request, where the slot was placed last.
        self._cell: Mapping[str, Any] = {}
        self._lock = threading.RLock()

    def show(self, bundle: Mapping[str, Any], *, is_to_place: bool = True) -> None:
        """Replace the contents; the first call, if it places the slot, is the cell's thread's.

        With ``is_to_place=False``, a slot in no output keeps ``bundle`` until :meth:`place`.
        """
        with self._lock:
            self.bundle = bundle
            if self.is_placed:
                self.send_again()
            elif is_to_place:
                self.place()

    def clear(self) -> None:
        """Show nothing; a slot in no output is placed first, as :meth:`show` does."""
        self.show(_NOTHING)

    def place(self) -> None:
        """Add the slot to the running cell's output too; only that cell's thread may."""
        with self._lock:
            self.is_placed = True
            self._cell = getattr(_publisher(), "parent_header", {})
            display(dict(self.bundle), raw=True, display_id=self._id)  # type: ignore[no-untyped-call]

    def show_in_next_page(self, bundle: Mapping[str, Any]) -> None:
        """Display it in the next cell run from another page: a reloaded one lacks old outputs."""
        shell: Any = get_ipython()

        def after_cell(_: Any) -> None:
            if _publisher().parent_header.get("session") != self._cell.get("session"):
                shell.events.unregister("post_run_cell", after_cell)
                DisplaySlot().show(bundle)

        if shell is not None:
            shell.events.register("post_run_cell", after_cell)

    def send_again(self) -> None:
        publisher = _publisher()
        with self._lock:
            replace = partial(update_display, dict(self.bundle), raw=True, display_id=self._id)
            # nbclient drops what belongs to a cell that has ended. In a context of its own the
            # message belongs to the cell that runs now, whatever cell started the thread.
            try:
                newest = contextvars.Context().run(getattr, publisher, "parent_header", {})
                contextvars.Context().run(replace)
            except LookupError:
                # ipykernel 7.0 knows no cell but that of the context.
                newest = self._cell
                replace()
            # VS Code draws nothing that answers its own hidden requests.
            if self._cell.get("msg_id") != newest.get("msg_id"):
                place = {"metadata": {}, "transient": {"display_id": self._id}}
                content = {"data": dict(self.bundle), **place}
                sent = publisher.pub_socket, "update_display_data", content
                publisher.session.send(*sent, parent=self._cell, ident=publisher.topic)


class WidgetSlot(DisplaySlot):
    """A place in a box of widgets, which a click can fill: it has no cell.

    Args:
        output: an ``ipywidgets.Output`` in that box.
        changed: called after each change.
    """

    def __init__(self, output: Any, changed: Callable[[], None]) -> None:
        super().__init__()
        self.is_placed = True
        self.output, self._changed = output, changed

    def send_again(self) -> None:
        shown = {"output_type": "display_data", "data": dict(self.bundle), "metadata": {}}
        self.output.outputs = (shown,)
        if self._cell:  # of a cell that showed it too
            super().send_again()
        self._changed()


def _publisher() -> Any:
    return getattr(get_ipython(), "display_pub", None)
