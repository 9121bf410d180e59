"""The only place where private names of ipykernel are used; a new release may change them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any


def publish_status(kernel: Any, status: str, request: Any) -> None:
    """Send a status for a request to the notebook's pages.

    After a click, a page waits for the status "idle" before it sends the next click. This uses
    ``Kernel._publish_status``. If ipykernel removed it, a click while a cell runs would raise an
    error, and the page would hold back further clicks.
    """
    kernel._publish_status(status, "shell", parent=request)


def parent_variable(kernel: Any) -> ContextVar[Any] | None:
    """Return the context variable that holds the request being answered.

    This uses ``Kernel._shell_parent``. Return None if this ipykernel has no such variable: a page
    that is reloaded while a cell runs then does not show its widgets until the cell has ended.
    """
    return getattr(kernel, "_shell_parent", None)


def let_any_subshell_answer(comm: Any) -> None:
    """Let any subshell of the kernel handle a comm's messages.

    This uses ``_reply_subshell_for``, which exists since ipykernel 7.4. If it were ignored, clicks
    would go to the shell that runs the cell, and wait until the cell has ended.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = None
