"""One line in the cell that starts a session."""

from __future__ import annotations

import time

from notebook_accel.launch.text import wording
from notebook_accel.launch.view import View
from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.markup import element

__all__ = ["StartingLine"]


class StartingLine(View):
    """Says that a session starts, and then that it has."""

    def __init__(self) -> None:
        self._slot = DisplaySlot()
        self._began = time.monotonic()
        self._is_shown = False

    def launch_is_slow(self, name: str) -> None:
        self._is_shown = True
        self._show(f"{name} starts, which takes some seconds")

    def launch_failed(self) -> None:
        if self._is_shown:
            self._show("the session was not started")

    def conclude(self, world_size: int) -> None:
        """The ranks were started."""
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        seconds = wording.span(time.monotonic() - self._began)
        self._show(f"session of {ranks} started in {seconds}; %accelerate stop ends it")

    def _show(self, text: str) -> None:
        html = element("span", text, style="opacity:.65;font-size:13px;padding:0 7px")
        self._slot.show({"text/html": str(html), "text/plain": text})
