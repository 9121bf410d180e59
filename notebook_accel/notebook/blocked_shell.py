"""What pages ask on the main shell of a kernel (ipykernel 7) while a cell blocks that.

A page that was opened anew or reloaded asks for the kernel's info, for its comms and for the state
of its widgets: it would show "Loading widget..." until the cell has ended. A page that knows no
subshells (VS Code, an older JupyterLab) sends clicks there. Meanwhile these messages, and no
others, are answered by the thread that takes messages in:

    page --> shell channel's thread --> BlockedShell._receive --> the kernel's own handlers
                                              |
                                              +-- all else --> queue of the main shell, as ipykernel

A page that has had no state of the widgets within four seconds (ipywidgets 8, where the machine is
busy), or knows of no way to ask for all of it, asks each widget for its own, on that widget's comm:
that is answered as well, whatever the widget is.

What came while the cell did something else, before it waited, is in that queue: as the wait begins,
the same messages are taken out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.system.interrupts import Latch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextvars import ContextVar

__all__ = ["BlockedShell", "blocked_shell_of"]

_QUESTIONS = {"kernel_info_request", "comm_info_request"}
_OF_COMMS = {"comm_open", "comm_msg", "comm_close"}
# The comm by which a page asks for the state of all widgets (ipywidgets 8).
_CONTROL_TARGET = "jupyter.widget.control"
# A thread that takes messages in gets its turn within milliseconds, on a busy machine too.
_TAKE_SECONDS = 5.0


class BlockedShell:
    """Answers pages while cells wait; there is one for a kernel, whose receiver it replaces."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._thread = kernel.shell_channel_thread
        self._lock = threading.Lock()
        self._waiting: set[object] = set()
        # Set once messages come here. No event: an interrupt of the person in its wait could leave
        # it locked for the thread that sets it.
        self._is_receiving = Latch()
        # Held while the other thread reads the main shell's queue; the main thread, whose socket
        # that is, lets it do so.
        self._queue_lock = threading.Lock()
        self._may_read_queue = False
        # What the cell answers to: the kernel is busy with that.
        self._cell: Any = None
        # Comms of widgets whose clicks are let through.
        self._clickable: weakref.WeakSet[Any] = weakref.WeakSet()
        # Touched by the shell channel's thread alone.
        self._control_comms: set[str] = set()

    def let_through(self, comm: Any) -> None:
        """Handle what pages send on ``comm``, in the thread that takes messages in."""
        self._clickable.add(comm)

    def start(self, waiting: object) -> None:
        """Answer from now on, until ``stop`` was called with everything that waits.

        It waits itself until the other thread has taken over: that one may be about to read a
        message as it did before, and would queue it behind the cell.
        """
        is_main = threading.current_thread() is threading.main_thread()
        with self._lock:
            if waiting in self._waiting:
                return
            self._cell = self._kernel.get_parent("shell")
            self._may_read_queue = self._may_read_queue or is_main
            if not self._waiting:
                self._is_receiving = Latch()
                self._thread.io_loop.add_callback(self._take_over, self._is_receiving)
            self._waiting.add(waiting)
            is_receiving = self._is_receiving
        try:
            # A click that is answered here may wait for a run.
            if threading.current_thread() is not self._thread:
                is_receiving.wait(_TAKE_SECONDS)
        finally:
            if is_main:
                with self._queue_lock:
                    self._may_read_queue = False

    def stop(self, waiting: object) -> None:
        """``waiting`` waits no longer: where nothing does, leave all messages to ipykernel."""
        with self._lock:
            if waiting not in self._waiting:
                return
            self._waiting.remove(waiting)
            if not self._waiting:
                self._thread.io_loop.add_callback(
                    self._kernel.shell_stream.on_recv,
                    self._kernel.shell_channel_thread_main,
                    copy=False,
                )

    def _take_over(self, is_receiving: Latch) -> None:
        try:
            self._kernel.shell_stream.on_recv(self._receive, copy=False)
            with self._queue_lock:
                if self._may_read_queue:
                    self._answer_queued()
        finally:
            is_receiving.set()

    def _answer_queued(self) -> None:
        """Answer what is queued behind the cell; the rest goes back in its order.

        A socket of zmq is for one thread at a time: the main thread waits meanwhile.
        """
        pair = self._thread.manager.get_shell_channel_to_subshell_pair(None)
        queued = []
        while pair.to_socket.poll(0):
            queued.append(pair.to_socket.recv_multipart(copy=False))
        for message in queued:
            if self._is_to_answer(message):
                asyncio.ensure_future(self._answer(message))  # noqa: RUF006 - ends in one step
            else:
                pair.from_socket.send_multipart(message, copy=False)

    async def _receive(self, message: Any) -> None:
        if self._is_to_answer(message):
            await self._answer(message)
        else:
            await self._kernel.shell_channel_thread_main(message)

    async def _answer(self, message: Any) -> None:
        kernel = self._kernel
        identities, frames = kernel.session.feed_identities(message, copy=False)
        request = kernel.session.deserialize(frames, content=True, copy=False)
        kernel._publish_status("busy", "shell", parent=request)
        asks_for_state = _asks_for_state(request["content"])
        with _answers_to(kernel, request) if asks_for_state else contextlib.nullcontext():
            answered = kernel.shell_handlers[request["msg_type"]](
                kernel.shell_stream, identities, request
            )
        if isawaitable(answered):
            await answered
        # A page holds back what it would ask next until it heard that this was handled.
        kernel._publish_status("idle", "shell", parent=request)
        kernel._publish_status("busy", "shell", parent=self._cell)

    def _is_to_answer(self, message: Any) -> bool:
        """A peek: deserialising would note the signature, and refuse the message afterwards."""
        session = self._kernel.session
        try:
            _, frames = session.feed_identities(message, copy=False)
            header = session.unpack(frames[1].bytes)
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


def _asks_for_state(content: Any) -> bool:
    """Whether a page asks one widget for its state, by the content of its message."""
    data = content.get("data")
    return isinstance(data, dict) and data.get("method") == "request_state"


@contextlib.contextmanager
def _answers_to(kernel: Any, request: Any) -> Iterator[None]:
    """What is sent meanwhile answers ``request``: the page takes no other state for its widget's.

    By the variable of the context alone: ``set_parent`` would also make the request that of each
    thread that the person started.
    """
    parent: ContextVar[Any] = kernel._shell_parent
    before = parent.set(request)
    try:
        yield
    finally:
        parent.reset(before)


@functools.cache
def blocked_shell_of(kernel: Any) -> BlockedShell | None:
    """That of the kernel; None where the kernel lacks what it needs, private parts of ipykernel."""
    has_parts = (
        hasattr(kernel, "shell_channel_thread_main")
        and hasattr(getattr(kernel, "shell_stream", None), "on_recv")
        and hasattr(getattr(kernel, "shell_channel_thread", None), "io_loop")
        and hasattr(kernel, "_shell_parent")
    )
    return BlockedShell(kernel) if has_parts else None
