"""Where the cell runs, and how a click gets through to it while it blocks.

A click on a widget is a message on the kernel's shell channel, which a running cell holds. What
gets around that differs between versions of ipykernel; each way is one small class here, and
nothing else knows of versions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.core.getipython import get_ipython

from notebook_accel.notebook.markup import element

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WAYS", "Clicks", "Pump", "Rest", "Subshell", "find_clicks", "find_kernel", "is_live"]

STOP_HINT = (
    "Stop all ranks at the same step and keep their results. "
    "The kernel's own Interrupt ends them as well."
)


class Clicks:
    """How clicks get through. This one: they don't, until the cell has ended."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    @classmethod
    def applies(cls, kernel: Any) -> bool:
        """Whether this is a way for ``kernel``."""
        return kernel is not None

    def free(self, widget: Any) -> None:
        """Let clicks on ``widget`` through. Called right after it was made."""

    def pump(self) -> None:
        """Handle the clicks that wait. Called by the thread that the cell blocks."""

    def stop_button(self, on_click: Callable[[], None]) -> Any:
        """A widget that asks for a stop when it is clicked."""
        button = ipywidgets.Button(description="Stop", tooltip=STOP_HINT)
        button.on_click(lambda _: on_click())
        self.free(button)
        return button


class Subshell(Clicks):
    """ipykernel 7: the page sends clicks to a thread of their own, a subshell.

    Since 7.4 the kernel sends them back to the thread that made the widget, unless one attribute
    of its comm says otherwise (ipykernel's ``shell_channel_thread_main`` reads it).
    """

    @classmethod
    def applies(cls, kernel: Any) -> bool:
        return bool(getattr(kernel, "_supports_kernel_subshells", False))

    def free(self, widget: Any) -> None:
        comm: Any = getattr(widget, "comm", None)
        if hasattr(comm, "_reply_subshell_for"):
            comm._reply_subshell_for = None


class Pump(Clicks):
    """ipykernel 6: the waiting thread takes the messages of widgets out of the shell's queue.

    All others go back in the order in which they came, so that no queued cell starts early.
    """

    @classmethod
    def applies(cls, kernel: Any) -> bool:
        return hasattr(kernel, "msg_queue") and hasattr(kernel, "shell_stream")

    def pump(self) -> None:
        messages = self.kernel.msg_queue
        self.kernel.shell_stream.flush()
        waiting = [messages.get_nowait() for _ in range(messages.qsize())]
        kept = list(waiting)
        try:
            for item in waiting:
                if self._kind_of(item) in ("comm_msg", "comm_close"):
                    kept.remove(item)
                    self._handle(item)
        finally:
            # An interrupt in a handler must not lose what came after it.
            for item in kept:
                messages.put_nowait(item)

    def _kind_of(self, item: Any) -> str | None:
        # A peek: deserialising would note the signature and refuse the replay as a duplicate.
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
        handler(kernel.shell_stream, identities, message)
        # A page holds back the next change of a widget until it heard that this one was handled.
        kernel._publish_status("idle", "shell", parent=message)
        kernel._publish_status("busy", "shell", parent=kernel.get_parent("shell"))


class Rest(Clicks):
    """Any page of a Jupyter server: a plain button asks the server to interrupt the kernel."""

    @classmethod
    def applies(cls, kernel: Any) -> bool:
        return _kernel_id(kernel) is not None

    def stop_button(self, on_click: Callable[[], None]) -> Any:
        script = _INTERRUPT % _kernel_id(self.kernel)
        markup = element("button", "Stop", class_="jupyter-button", title=STOP_HINT, onclick=script)
        return ipywidgets.HTML(value=str(markup))


WAYS: tuple[type[Clicks], ...] = (Subshell, Pump, Rest, Clicks)


def find_kernel() -> Any | None:
    """The kernel in which this code runs; None in a terminal or in plain Python."""
    return getattr(get_ipython(), "kernel", None)


def find_clicks(kernel: Any) -> Clicks:
    """The first way for clicks that applies."""
    return next(way for way in WAYS if way.applies(kernel))(kernel)


def is_live(kernel: Any) -> bool:
    """Whether a person can answer: nbclient and papermill run cells without ``allow_stdin``."""
    return bool(getattr(kernel, "_allow_stdin", True))


def _kernel_id(kernel: Any) -> str | None:
    """The server's id of the kernel, which it writes into the connection file's name."""
    config = getattr(kernel, "config", None) or {}
    name = str(config.get("IPKernelApp", {}).get("connection_file", ""))
    found = re.search(r"kernel-([\w-]+)\.json$", name)
    return found[1] if found else None


_INTERRUPT = (
    "(async(b)=>{const d=document;const c=JSON.parse("
    '(d.getElementById("jupyter-config-data")||{textContent:"{}"}).textContent);'
    "const x=(d.cookie.match(/(?:^|; )_xsrf=([^;]*)/)||[])[1];"
    'const r=await fetch((c.baseUrl||"/")+"api/kernels/%s/interrupt",'
    '{method:"POST",credentials:"same-origin",'
    'headers:x?{"X-XSRFToken":decodeURIComponent(x)}:{}});'
    'b.textContent=r.ok?"Stopping":"Failed"})(this)'
)
