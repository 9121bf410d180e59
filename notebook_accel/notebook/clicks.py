"""How a click on a widget gets through to a kernel while a cell blocks it.

A click is a message on the kernel's shell channel, which a running cell holds. What gets around
that differs between versions of ipykernel. Each way is one small class here, tried in the order
of :data:`CLICK_WAYS`; nothing else knows of versions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, ClassVar

from IPython.core.getipython import get_ipython

from notebook_accel.notebook.blocked_shell import blocked_shell_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "CLICK_WAYS",
    "ClicksAfterTheCell",
    "ClicksByPump",
    "ClicksBySubshell",
    "ClicksInColab",
    "can_answer",
    "clicks_for",
    "find_kernel",
    "page_of_cell",
]


class ClicksAfterTheCell:
    """The base of all ways, and the last one: clicks are handled when the cell has ended."""

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
        """Whether this way works in ``kernel``, which may be none."""
        return True

    def let_through(self, widget: Any) -> None:
        """Let clicks on ``widget`` through; called before a page shows the widget."""

    def keep_order(self, widgets: Iterable[Any]) -> None:
        """Take what a page sends to these in the order in which it does so.

        Called before a page shows them. A click on Save comes after what was typed before it.
        """

    def pump(self) -> None:
        """Handle the clicks that wait; called again and again by the thread of the cell."""

    def stop_pumping(self) -> None:
        """The thread of the cell waits no longer; called also where it never pumped."""


class ClicksBySubshell(ClicksAfterTheCell):
    """ipykernel 7: the page sends clicks to a thread of their own, a subshell.

    Since 7.4 the kernel sends them on to the thread in which the widget was last spoken of, each
    widget's to its own, unless one attribute of its comm says otherwise (ipykernel's
    ``shell_channel_thread_main`` reads it). What pages send to the main shell all the same is
    answered while the cell waits for the run, and only then.
    """

    advice = ""

    def __init__(self, kernel: Any) -> None:
        super().__init__(kernel)
        self._shell = blocked_shell_of(kernel)

    @classmethod
    def works_in(cls, kernel: Any) -> bool:
        return bool(getattr(kernel, "_supports_kernel_subshells", False))

    def let_through(self, widget: Any) -> None:
        self.keep_order([widget])
        comm: Any = getattr(widget, "comm", None)
        if self._shell is not None and comm is not None:
            self._shell.let_through(comm)

    def keep_order(self, widgets: Iterable[Any]) -> None:
        for widget in widgets:
            comm: Any = getattr(widget, "comm", None)
            if hasattr(comm, "_reply_subshell_for"):
                comm._reply_subshell_for = None

    def pump(self) -> None:
        if self._shell is not None:
            self._shell.start(self)

    def stop_pumping(self) -> None:
        if self._shell is not None:
            self._shell.stop(self)


class ClicksByPump(ClicksAfterTheCell):
    """ipykernel 6: the waiting thread takes the messages of widgets out of the shell's queue.

    All others go back in the order in which they came, so that no queued cell starts early.
    A page that was reloaded asks for the kernel's info and the list of comms, and opens one by
    which it gets the state of the widgets; that is answered as well. While a cell computes, nobody
    pumps: clicks come after it.
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
                if self._type_of(item) in self._HANDLED:
                    kept.remove(item)
                    self._handle(item)
        finally:
            # An interrupt in a handler must not lose what came after it.
            for item in kept:
                messages.put_nowait(item)

    def _type_of(self, item: Any) -> str | None:
        # A peek: deserialising would note the signature, and the kernel would refuse the message
        # as a duplicate when it comes to it.
        session = self.kernel.session
        try:
            _, frames = session.feed_identities(item[2][0], copy=False)
            return str(session.unpack(frames[1].bytes)["msg_type"])
        except Exception:
            # A message that cannot be read is the kernel's to refuse.
            return None

    def _handle(self, item: Any) -> None:
        kernel = self.kernel
        identities, frames = kernel.session.feed_identities(item[2][0], copy=False)
        message = kernel.session.deserialize(frames, content=True, copy=False)
        handler = kernel.shell_handlers[message["msg_type"]]
        answered = handler(kernel.shell_stream, identities, message)
        if isinstance(answered, Coroutine):
            # Those of ipykernel are coroutines that await nothing: they end at their first step.
            with contextlib.suppress(StopIteration):
                answered.send(None)
        # A page holds back the next change of a widget until it heard that this one was handled.
        kernel._publish_status("idle", "shell", parent=message)
        kernel._publish_status("busy", "shell", parent=kernel.get_parent("shell"))


class ClicksInColab(ClicksByPump):
    """Colab, whose kernel is ipykernel 6: its pages draw nothing that comes while no cell runs.

    That is issue 3373 of googlecolab/colabtools.
    """

    draws_between_cells = False

    @classmethod
    def works_in(cls, kernel: Any) -> bool:
        # Colab's kernels have imported it before the first cell.
        return "google.colab" in sys.modules and super().works_in(kernel)


CLICK_WAYS: tuple[type[ClicksAfterTheCell], ...] = (
    ClicksInColab,
    ClicksBySubshell,
    ClicksByPump,
    ClicksAfterTheCell,
)


def find_kernel() -> Any | None:
    """The kernel in which this code runs; None in a terminal or in plain Python."""
    return getattr(get_ipython(), "kernel", None)


def clicks_for(kernel: Any) -> ClicksAfterTheCell:
    """The first way for clicks that works in ``kernel``."""
    return next(way for way in CLICK_WAYS if way.works_in(kernel))(kernel)


def page_of_cell() -> str | None:
    """Which page has sent the cell that runs now: one that is reloaded is another one."""
    kernel = find_kernel()
    if kernel is None:
        return None
    sent: str | None = kernel.get_parent("shell").get("header", {}).get("session")
    return sent


def can_answer(kernel: Any) -> bool:
    """Whether a person can: nbclient and papermill send cells with ``allow_stdin=False``."""
    return bool(getattr(kernel, "_allow_stdin", True))
