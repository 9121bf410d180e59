"""What ranks displayed, as outputs of the cell that waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.notebook.display_slot import DisplaySlot
from notebook_accel.notebook.markup import element

if TYPE_CHECKING:
    from notebook_accel.launch.control.state import RankState, RunState

__all__ = ["RankDisplays", "show_displays"]


class RankDisplays:
    """Shows what one rank displays, each thing once, below what the cell has shown so far.

    As an output of its own each keeps its MIME types: the page draws figures, HTML, Markdown and
    LaTeX as it draws those of an ordinary cell, and saves them with the notebook. Ranks mostly
    display the same: those of the first one are shown for which the call is meant, the others' on
    demand (``run.show(rank)``).
    """

    def __init__(self) -> None:
        self._num_shown = 0

    def show_new(self, state: RunState) -> None:
        """Show what is new. Only the thread of the cell may call this."""
        rank = next((rank for rank in state.ranks if rank.is_asked), state.ranks[0])
        num_new = min(rank.num_displays - self._num_shown, len(rank.displays))
        self._num_shown = rank.num_displays
        if num_new:
            _show(rank, num_new, with_label=state.world_size > 1)


def show_displays(state: RunState, rank: int = 0) -> None:
    """Show all that is kept of what a rank displayed, as outputs of the cell that runs now."""
    found = state.ranks[rank]
    if found.displays:
        _show(found, len(found.displays), with_label=state.world_size > 1)


def _show(rank: RankState, number: int, *, with_label: bool) -> None:
    for data in rank.displays[-number:]:
        if with_label:
            label = f"rank {rank.rank}"
            html = element("span", label, style="opacity:.65;font-size:13px;padding:0 7px")
            DisplaySlot().show({"text/html": str(html), "text/plain": label})
        DisplaySlot().show(data)
