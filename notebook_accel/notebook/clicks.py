"""How a click on a widget reaches a kernel that is blocked by a running cell.

The page sends a click on the kernel's shell channel, which handles nothing else while a cell runs.
The way around that differs between versions of ipykernel: the first of :data:`CLICK_WAYS` that
works in the kernel is taken.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from inspect import isawaitable
from typing import Any, ClassVar

from IPython.core.getipython import get_ipython

from notebook_accel.private import of_libraries

# ---- What pages ask on the main shell of a kernel (ipykernel 7) while a cell blocks that.
#
# A page that was opened anew or reloaded asks for the kernel's info, for its comms and for the
# state of its widgets: it would show "Loading widget..." until the cell has ended. A page that
# knows no subshells (VS Code, an older JupyterLab) sends clicks there. Meanwhile these messages,
# and no others, are answered by the thread that takes messages in:
#
#     page --> shell channel's thread --> BlockedShell._receive --> the kernel's own handlers
#                                               |
#                                               +-- all else --> queue of the main shell
#
# A page that has had no state of the widgets within four seconds (ipywidgets 8, where the machine
# is busy), or knows of no way to ask for all of it, asks each widget for its own, on that widget's
# comm: that is answered as well, whatever the widget is.

_QUESTIONS = {"kernel_info_request", "comm_info_request"}
_OF_COMMS = {"comm_open", "comm_msg", "comm_close"}
# The comm by which a page asks for the state of all widgets (ipywidgets 8).
_CONTROL_TARGET = "jupyter.widget.control"


class BlockedShell:
    """Answers certain messages of pages (ipykernel 7) while a cell blocks the kernel's main shell.

    A kernel has one at most. It takes the place of the kernel's receiver of messages, and runs
    in the thread of the shell channel.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._thread = kernel.shell_channel_thread
        self._lock = threading.Lock()
        self._waiting: set[object] = set()
        # What the cell answers to: the kernel is busy with that.
        self._cell: Any = None
        # Comms of widgets whose clicks are let through.
        self._clickable: weakref.WeakSet[Any] = weakref.WeakSet()
        # Touched by the shell channel's thread alone.
        self._control_comms: set[str] = set()

    def let_through(self, comm: Any) -> None:
        """Also answer messages of ``comm``, a widget's, in the thread of the shell channel."""
        self._clickable.add(comm)

    def start(self, waiting: object) -> None:
        """Answer messages of pages until every caller has called ``stop`` with its own object."""
        with self._lock:
            if waiting in self._waiting:
                return
            self._cell = self._kernel.get_parent("shell")
            if not self._waiting:
                self._receive_by(self._receive)
            self._waiting.add(waiting)

    def stop(self, waiting: object) -> None:
        with self._lock:
            if waiting not in self._waiting:
                return
            self._waiting.remove(waiting)
            if not self._waiting:
                self._receive_by(self._kernel.shell_channel_thread_main)

    def _receive_by(self, receiver: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Make ``receiver`` handle the channel's messages, soon, in the thread that owns it."""
        self._thread.io_loop.add_callback(self._kernel.shell_stream.on_recv, receiver, copy=False)

    async def _receive(self, message: Any) -> None:
        kernel = self._kernel
        if not self._is_to_answer(message):
            await kernel.shell_channel_thread_main(message)
            return
        identities, request = _read(kernel, message)
        of_libraries.publish_status(kernel, "busy", request)
        # What the kernel sends of a state is a reply to the request; all that a click changes comes
        # from the cell. (ipykernel 7.0 knows no parent in this thread, and refuses to send.) The
        # kernel's ``set_parent`` would also take the output of every thread that the user started.
        parent: Any = of_libraries.parent_variable(kernel)
        before = parent.set(request if _asks_for_state(request["content"]) else self._cell)
        try:
            handler = kernel.shell_handlers[request["msg_type"]]
            answered = handler(kernel.shell_stream, identities, request)
        finally:
            parent.reset(before)
        if isawaitable(answered):
            await answered
        # A page holds back what it would ask next until it heard that this was handled.
        of_libraries.publish_status(kernel, "idle", request)
        of_libraries.publish_status(kernel, "busy", self._cell)

    def _is_to_answer(self, message: Any) -> bool:
        session = self._kernel.session
        try:
            frames, header = _peek(session, message)
            kind = header["msg_type"]
            on_main_shell = header.get("subshell_id") is None
            if kind not in _OF_COMMS:
                return on_main_shell and kind in _QUESTIONS
            content = session.unpack(frames[4].bytes)
            # Also where the page names a subshell: ipykernel 7.4 sends what comes on a comm to the
            # shell that the widget was last spoken of in.
            if _asks_for_state(content):
                return True
            if not on_main_shell:
                return False
            if kind == "comm_open" and content["target_name"] == _CONTROL_TARGET:
                self._control_comms.add(content["comm_id"])
            if content["comm_id"] in self._control_comms:
                return True
            return self._kernel.comm_manager.comms.get(content["comm_id"]) in self._clickable
        except Exception:
            # A message that cannot be read is the kernel's to refuse.
            return False


def _read(kernel: Any, message: Any) -> tuple[Any, Any]:
    identities, frames = kernel.session.feed_identities(message, copy=False)
    return identities, kernel.session.deserialize(frames, content=True, copy=False)


def _peek(session: Any, message: Any) -> tuple[Any, Any]:
    """Return frames and header: once deserialised, the kernel refuses a message as a duplicate."""
    _, frames = session.feed_identities(message, copy=False)
    return frames, session.unpack(frames[1].bytes)


def _asks_for_state(content: Any) -> bool:
    data = content.get("data")
    return isinstance(data, dict) and data.get("method") == "request_state"


@functools.cache
def blocked_shell_of(kernel: Any) -> BlockedShell | None:
    """Return the kernel's ``BlockedShell``; None where ipykernel lacks what it needs."""
    has_parts = (
        hasattr(kernel, "shell_channel_thread_main")
        and hasattr(getattr(kernel, "shell_stream", None), "on_recv")
        and hasattr(getattr(kernel, "shell_channel_thread", None), "io_loop")
        and of_libraries.parent_variable(kernel) is not None
    )
    return BlockedShell(kernel) if has_parts else None


# ---- The ways.


class ClicksAfterTheCell:
    """The base class of all ways, and the last resort: clicks wait until the cell has ended."""

    # Said on the panel; "" where clicks get through.
    advice: ClassVar[str] = "Clicks wait while a cell runs: use the kernel's Interrupt."
    # Said in Stop's tooltip.
    tooltip: ClassVar[str] = ""
    # Whether the page draws what comes while no cell runs.
    draws_between_cells: ClassVar[bool] = True

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    @classmethod
    def works_in(cls, kernel: Any) -> bool:  # noqa: ARG003
        return True

    def let_through(self, widget: Any) -> None:
        """Called before the widget is shown."""

    def keep_order(self, widgets: Iterable[Any]) -> None:
        """Have a form's messages handled in order; called before a page shows the widgets."""

    def pump(self) -> None:
        """Handle the clicks that have come; called often by the cell's thread while it waits."""

    def stop_pumping(self) -> None:
        """Undo what ``pump`` set up; it may also be called if ``pump`` never was."""


class ClicksBySubshell(ClicksAfterTheCell):
    """ipykernel 7: the page sends clicks to a subshell, a thread beside the one that runs cells.

    Since 7.4 the kernel passes messages on to the thread that last used the widget, unless its comm
    allows any subshell. Pages without subshells click in the main shell: :class:`BlockedShell`.
    """

    advice = ""

    def __init__(self, kernel: Any) -> None:
        super().__init__(kernel)
        self._shell = blocked_shell_of(kernel)

    @classmethod
    def works_in(cls, kernel: Any) -> bool:
        return getattr(kernel, "shell_channel_thread", None) is not None

    def let_through(self, widget: Any) -> None:
        self.keep_order([widget])
        comm: Any = getattr(widget, "comm", None)
        if self._shell is not None and comm is not None:
            self._shell.let_through(comm)

    def keep_order(self, widgets: Iterable[Any]) -> None:
        for widget in widgets:
            comm: Any = getattr(widget, "comm", None)
            of_libraries.let_any_subshell_answer(comm)

    def pump(self) -> None:
        if self._shell is not None:
            self._shell.start(self)

    def stop_pumping(self) -> None:
        if self._shell is not None:
            self._shell.stop(self)


class ClicksByPump(ClicksAfterTheCell):
    """ipykernel 6: the thread of a cell that waits for a run handles messages of widgets itself.

    It takes them out of the shell's queue and leaves all others in order. What a reloaded page asks
    for is answered as well. While a cell computes instead of waiting, clicks wait for its end.
    """

    advice = ""
    tooltip = "While another cell computes, clicks wait for its end."
    _HANDLED = ("comm_open", "comm_msg", "comm_close", "comm_info_request", "kernel_info_request")

    @classmethod
    def works_in(cls, kernel: Any) -> bool:
        return hasattr(kernel, "msg_queue") and hasattr(kernel, "shell_stream")

    def pump(self) -> None:
        messages = self.kernel.msg_queue
        self.kernel.shell_stream.flush()
        waiting = [messages.get_nowait() for _ in range(messages.qsize())]
        kept = list(waiting)
        try:
            for item in waiting:
                kind = None
                # A message that cannot be read is the kernel's to refuse.
                with contextlib.suppress(Exception):
                    kind = _peek(self.kernel.session, item[2][0])[1]["msg_type"]
                if kind in self._HANDLED:
                    kept.remove(item)
                    self._handle(item)
        finally:
            # An interrupt in a handler must not lose what came after it.
            for item in kept:
                messages.put_nowait(item)

    def _handle(self, item: Any) -> None:
        kernel = self.kernel
        identities, message = _read(kernel, item[2][0])
        handler = kernel.shell_handlers[message["msg_type"]]
        answered = handler(kernel.shell_stream, identities, message)
        if isinstance(answered, Coroutine):
            # Those of ipykernel are coroutines that await nothing: they end at their first step.
            with contextlib.suppress(StopIteration):
                answered.send(None)
        # A page holds back the next change of a widget until it heard that this one was handled.
        of_libraries.publish_status(kernel, "idle", message)
        of_libraries.publish_status(kernel, "busy", kernel.get_parent("shell"))


class ClicksInColab(ClicksByPump):
    """Colab (ipykernel 6), whose pages draw nothing while no cell runs (colabtools issue 3373)."""

    draws_between_cells = False

    @classmethod
    def works_in(cls, kernel: Any) -> bool:
        # Kaggle and others have google.colab too, and plotly imports it: only the shell tells.
        shell = type(getattr(kernel, "shell", None))
        return shell.__module__.startswith("google.colab.") and super().works_in(kernel)


CLICK_WAYS: tuple[type[ClicksAfterTheCell], ...] = (
    ClicksInColab,
    ClicksBySubshell,
    ClicksByPump,
    ClicksAfterTheCell,
)


def find_kernel() -> Any | None:
    """Return None in a terminal or in plain Python."""
    return getattr(get_ipython(), "kernel", None)


def clicks_for(kernel: Any) -> ClicksAfterTheCell:
    """Return an instance of the first class in :data:`CLICK_WAYS` that works; None is no kernel."""
    return next(way for way in CLICK_WAYS if way.works_in(kernel))(kernel)


def draws_updates(kernel: Any) -> bool:
    """Return whether the client that runs this cell draws updates of displays; True for None.

    Clients of Python do not, whose requests end with a process's number and a count, but for
    programs that execute notebooks.
    """
    header: Mapping[str, Any] = kernel.get_parent("shell").get("header", {}) if kernel else {}
    is_of_python = re.search(r"_\d+_\d+$", header.get("msg_id", ""))
    return not is_of_python or not can_answer(kernel)


def can_answer(kernel: Any) -> bool:
    """Return whether a person can answer ``input()``, as the page says; True for no kernel."""
    content: Mapping[str, Any] = kernel.get_parent("shell").get("content", {}) if kernel else {}
    return bool(content.get("allow_stdin", True))
