"""A page that comes to a kernel (ipykernel 7) while a cell blocks it: opened anew, or reloaded.

Such a page asks for the kernel's info, for its comms and for the state of its widgets, all on the
main shell, which the cell holds: it would show "Loading widget..." until the cell has ended.
Meanwhile these questions, and no others, are answered by the thread that takes messages in:

    page --> shell channel's thread --> NewPages._receive --> the kernel's own handlers
                                              |
                                              +-- all else --> as ipykernel does
"""

from __future__ import annotations

from inspect import isawaitable
from typing import Any

__all__ = ["NewPages"]

_QUESTIONS = {"kernel_info_request", "comm_info_request"}
_OF_COMMS = {"comm_open", "comm_msg", "comm_close"}
# The comm by which a page asks for the state of all widgets (ipywidgets 8).
_CONTROL_TARGET = "jupyter.widget.control"


class NewPages:
    """Answers new pages while a cell runs; what it does is undone by :meth:`stop`."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._loop = kernel.shell_channel_thread.io_loop
        self._is_wanted = False
        # What the cell answers to: the kernel is busy with that.
        self._cell: Any = None
        # Touched by the shell channel's thread alone.
        self._control_comms: set[str] = set()

    @classmethod
    def works_in(cls, kernel: Any) -> bool:
        """Whether the kernel has what this needs; its parts are private to ipykernel."""
        return (
            hasattr(kernel, "shell_channel_thread_main")
            and hasattr(getattr(kernel, "shell_stream", None), "on_recv")
            and hasattr(getattr(kernel, "shell_channel_thread", None), "io_loop")
        )

    def start(self) -> None:
        """Answer from now on, in the cell's thread; nothing happens where it does already."""
        if not self._is_wanted:
            self._is_wanted = True
            self._cell = self._kernel.get_parent("shell")
            self._loop.add_callback(self._take, self._receive)

    def stop(self) -> None:
        """Leave all messages to ipykernel again."""
        if self._is_wanted:
            self._is_wanted = False
            self._loop.add_callback(self._take, self._kernel.shell_channel_thread_main)

    def _take(self, receive: Any) -> None:
        self._kernel.shell_stream.on_recv(receive, copy=False)

    async def _receive(self, message: Any) -> None:
        if self._is_of_new_page(message):
            await self._answer(message)
        else:
            await self._kernel.shell_channel_thread_main(message)

    async def _answer(self, message: Any) -> None:
        kernel = self._kernel
        identities, frames = kernel.session.feed_identities(message, copy=False)
        request = kernel.session.deserialize(frames, content=True, copy=False)
        kernel._publish_status("busy", "shell", parent=request)
        answered = kernel.shell_handlers[request["msg_type"]](
            kernel.shell_stream, identities, request
        )
        if isawaitable(answered):
            await answered
        # A page holds back what it would ask next until it heard that this was handled.
        kernel._publish_status("idle", "shell", parent=request)
        kernel._publish_status("busy", "shell", parent=self._cell)

    def _is_of_new_page(self, message: Any) -> bool:
        """A peek: deserialising would note the signature, and refuse the message afterwards."""
        session = self._kernel.session
        try:
            _, frames = session.feed_identities(message, copy=False)
            header = session.unpack(frames[1].bytes)
            kind = header["msg_type"]
            if header.get("subshell_id") is not None or kind not in _QUESTIONS | _OF_COMMS:
                return False
            if kind in _QUESTIONS:
                return True
            content = session.unpack(frames[4].bytes)
            if kind == "comm_open" and content["target_name"] == _CONTROL_TARGET:
                self._control_comms.add(content["comm_id"])
            return content["comm_id"] in self._control_comms
        except Exception:
            # A message that cannot be read is the kernel's to refuse.
            return False
