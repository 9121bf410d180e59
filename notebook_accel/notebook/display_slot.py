"""One slot in a cell's output: what is shown there first can be replaced later, from any thread."""

from __future__ import annotations

import contextvars
import threading
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.display import display, update_display

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DisplaySlot", "start_thread", "widget_view"]

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# It takes no room in the pages of JupyterLab and Notebook 7.
_NOTHING = {"text/plain": "", "text/html": ""}


def widget_view(widget: Any, text: str) -> dict[str, Any]:
    """Return the MIME bundle of a widget; ``text`` is its fallback in a saved notebook."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {_WIDGET_VIEW: view, "text/plain": text}


def start_thread(act: Callable[[], None], *, name: str) -> threading.Thread:
    """Start a thread that may change widgets and slots, and return it.

    ipykernel 7.0 finds the cell or the click to which their messages belong by the thread's context
    alone.
    """
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(act,), name=name, daemon=True)
    thread.start()
    return thread


class DisplaySlot:
    """A place in a cell's output, made by the first :meth:`show`, whose contents can be replaced.

    Contents are mappings from MIME types, as Jupyter's messages have them.

    Attributes:
        is_placed: whether an output of a cell has it.
    """

    def __init__(self) -> None:
        self._id = f"notebook-accel-{uuid.uuid4().hex}"
        self._bundle: Mapping[str, Any] = _NOTHING
        self.is_placed = False
        self._lock = threading.RLock()

    def show(self, bundle: Mapping[str, Any], *, is_to_place: bool = True) -> None:
        """Show ``bundle`` in the slot, in place of what was there.

        The call that places it must come from the cell's own thread; others may come from any.

        Args:
            bundle: what is shown.
            is_to_place: place the slot if it is not; else it shows this once it is.
        """
        with self._lock:
            self._bundle = bundle
            if self.is_placed:
                self.send_again()
            elif is_to_place:
                self.place()

    def clear(self) -> None:
        """Show nothing; the first call makes the place, as of ``show``."""
        self.show(_NOTHING)

    def place(self) -> None:
        """Put the slot into the output of the cell that runs now, also where it is in others.

        It shows the same in all of them. Only the cell's own thread may call this.
        """
        with self._lock:
            self.is_placed = True
            display(dict(self._bundle), raw=True, display_id=self._id)  # type: ignore[no-untyped-call]

    def send_again(self) -> None:
        """Send what the slot shows once more, to a page that may not have got it."""
        with self._lock:
            replace = partial(update_display, dict(self._bundle), raw=True, display_id=self._id)
            # nbclient drops what belongs to a cell that has ended. In a context of its own the
            # message belongs to the cell that runs now, whatever cell started the thread.
            try:
                contextvars.Context().run(replace)
            except LookupError:
                # ipykernel 7.0 knows no cell but that of the context.
                replace()
