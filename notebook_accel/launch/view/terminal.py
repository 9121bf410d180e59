"""A run in a terminal: lines as in the plain view, and a bar for each rank, drawn in its place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from notebook_accel.launch.view.plain import PlainView
from notebook_accel.launch.view.progress import ProgressLine, progress_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.run import Run

__all__ = ["TerminalView"]

# As often as a panel is drawn.
_DRAW_SECONDS = 0.2
# More bars than this would fill a small window.
_MAX_BARS = 8


class TerminalView(PlainView):
    """Draws the ranks' bars below the lines, by tqdm.

    Args:
        stream: the terminal; None for ``sys.stdout`` at the time.
        is_cell: as for :class:`PlainView`.
    """

    def __init__(self, stream: TextIO | None = None, *, is_cell: bool = False) -> None:
        super().__init__(stream, progress_seconds=_DRAW_SECONDS, is_cell=is_cell)
        self._terminal = stream
        self._bars: dict[int, tqdm[Any]] = {}

    def write(self, lines: Sequence[str]) -> None:
        if lines:
            # It takes the bars away, and draws them again below.
            tqdm.write("\n".join(lines), file=self._terminal or sys.stdout)

    def print_progress(self, state: RunState) -> None:
        for rank in state.ranks[:_MAX_BARS]:
            lines = progress_lines(rank, throughput=self._throughput.of(rank.rank))
            if lines[0].count:
                self._draw(rank.rank, lines)

    def print_summary(self, run: Run) -> None:
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()
        super().print_summary(run)

    def _draw(self, rank: int, lines: Sequence[ProgressLine]) -> None:
        """Draw the outermost bar of a rank, with the labels and counts of those inside it."""
        labels = [line.label for line in lines if line.label]
        description = f"rank {rank}  {' > '.join(labels)}"
        left = f"{lines[0].remaining} left" if lines[0].remaining else ""
        facts = [*(line.count for line in lines), lines[-1].rate, left]
        # Not as a postfix, before which tqdm puts a comma.
        text = "  ".join(fact for fact in facts if fact)
        bar_format = "{desc} |{bar}| " + text.replace("{", "{{").replace("}", "}}")
        if rank not in self._bars:
            # tqdm draws a bar as it is made: it says at once what it is of.
            self._bars[rank] = tqdm(
                desc=description,
                total=1.0,
                position=len(self._bars),
                leave=False,
                dynamic_ncols=True,
                file=self._terminal or sys.stdout,
                bar_format=bar_format,
            )
        bar = self._bars[rank]
        bar.n = lines[0].fraction or 0.0
        bar.bar_format = bar_format
        bar.set_description_str(description)
