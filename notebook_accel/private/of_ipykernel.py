"""Private names of ipykernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextvars import ContextVar

__all__ = ["let_any_subshell_answer", "parent_variable", "publish_status"]


def publish_status(kernel: Any, status: str, request: Any) -> None:
    """Tell pages "busy" or "idle" in answer to a request (``Kernel._publish_status``).

    Without it a click during a cell raises, and the page holds back the next one.
    """
    kernel._publish_status(status, "shell", parent=request)


def parent_variable(kernel: Any) -> ContextVar[Any] | None:
    """Return the variable of the request being answered (``_shell_parent``); None without one.

    Without it a page that is reloaded while a cell runs shows its widgets after the cell only.
    """
    found: ContextVar[Any] | None = getattr(kernel, "_shell_parent", None)
    return found


def let_any_subshell_answer(comm: Any) -> None:
    """Let any subshell answer a comm's messages (``_reply_subshell_for``; ipykernel 7.4 on).

    Without it clicks go to the shell that the cell blocks, and wait for its end.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = None
