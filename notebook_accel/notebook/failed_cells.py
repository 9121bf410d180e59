"""The numbers of the cells that raised: what they were to do, they may not have done."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["failed_cells", "watch_cells"]

_failed: weakref.WeakKeyDictionary[InteractiveShell, set[int]] = weakref.WeakKeyDictionary()


def watch_cells(shell: InteractiveShell) -> None:
    """Note from now on which of the shell's cells raise."""
    if shell in _failed:
        return
    failed: set[int] = set()
    _failed[shell] = failed

    def after_cell(result: Any) -> None:
        if not result.success and result.execution_count is not None:
            failed.add(result.execution_count)

    events: Any = shell.events
    events.register("post_run_cell", after_cell)


def failed_cells(shell: InteractiveShell) -> AbstractSet[int] | None:
    """The numbers of the cells that raised; None where nobody has watched."""
    return _failed.get(shell)
