"""What the notebook itself knows of a session's names: completion, and a hint where one is missing.

A name of the session is no name of the notebook: ``model.eval()`` in a plain cell is a NameError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.launch.text.used_names import PROVIDED, CellNames, names_of, without_watcher

_MAGIC = "%%accelerate"


class SessionHints:
    """Completes the session's names in plain cells, hints at them after a NameError, reports cells.

    ``note_assigned`` gets what a cell assigned here; nothing of one that failed or ran there.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        names: Callable[[], Iterable[str]],
        note_assigned: Callable[[Iterable[str]], None],
    ) -> None:
        self._shell: Any = shell
        self._names = names
        self._note_assigned = note_assigned
        self._shell.events.register("post_run_cell", self._after_cell)
        self._matchers: list[Any] = self._shell.Completer.custom_matchers
        self._matchers.append(self._complete)

    def remove(self) -> None:
        self._shell.events.unregister("post_run_cell", self._after_cell)
        self._matchers[:] = [one for one in self._matchers if one != self._complete]

    def _complete(self, text: str) -> list[str]:
        return sorted(name for name in self._names() if text and name.startswith(text))

    def _after_cell(self, result: Any) -> None:
        text = getattr(getattr(result, "info", None), "raw_cell", None) or ""
        error = result.error_in_exec
        if isinstance(error, NameError):
            self._hint(getattr(error, "name", None))
        is_the_notebooks = result.success and not text.lstrip().startswith(_MAGIC)
        names = CellNames()
        if is_the_notebooks:
            names = names_of(self._shell.transform_cell(without_watcher(text)))
        self._note_assigned(names.assigned)

    def _hint(self, name: str | None) -> None:
        if name not in set(self._names()) or name in self._shell.user_ns:
            return
        where = f"lives in the session: `%accelerate pull {name}`"
        if name in PROVIDED:
            # Each rank has its own, and an accelerator may not have been made yet.
            where = "is there in the cells of `%%accelerate`"
        sys.stderr.write(f"`{name}` {where}\n")
