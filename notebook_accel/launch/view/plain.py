"""A run as plain lines: in a terminal, in plain Python, and in notebooks that a program runs.

Only the caller's thread prints, while it waits. A line budget keeps a flood out of the output:
what is beyond it is counted, and is whole in the run's folder.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from notebook_accel.launch.control.terminal_text import strip_escapes
from notebook_accel.launch.view import View, wording
from notebook_accel.launch.view.outline import Pace, advance
from notebook_accel.launch.view.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.launch.control.state import RankState, RunState
    from notebook_accel.launch.run import Run

__all__ = ["PlainView"]

_MAX_ROWS = 16
_MAX_WIDTH = 2000


class PlainView(View):
    """Prints ``[rank 0] text`` lines, progress and metrics now and then, and a summary at the end.

    Args:
        stream: where to print; None for ``sys.stdout`` at the time.
        burst: lines of output that may be printed at once.
        lines_per_second: how fast the budget fills up again.
        progress_seconds: time between two lines about a rank's progress.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        burst: int = 400,
        lines_per_second: float = 20.0,
        progress_seconds: float = 10.0,
    ) -> None:
        self._stream = stream
        self._budget = _Budget(burst, lines_per_second)
        self._progress_seconds = progress_seconds
        self._run: Run | None = None
        self._ranks: dict[int, _Printed] = {}
        self._num_notices = 0
        self._pace = Pace()
        self._next_progress = 0.0
        self._is_settled = False

    def open(self, run: Run) -> None:
        self._run = run
        self._next_progress = time.monotonic() + self._progress_seconds

    def reopen(self, run: Run) -> None:
        """Print the summary of the run as it stands."""
        self._write(summarise(run.state, now=time.time()))

    def poll(self) -> None:
        if self._run is None:
            return
        state = self._run.state
        now = time.monotonic()
        self._pace.see(state, now=now)
        self._print_news(state)
        if now >= self._next_progress:
            self._next_progress = now + self._progress_seconds
            self._print_progress(state)

    def settle(self) -> None:
        if self._run is None or self._is_settled:
            return
        self._is_settled = True
        self._print_news(self._run.state)
        self.conclude(self._run)

    def conclude(self, run: Run) -> None:
        """Say how the run ended."""
        self._write(summarise(run.state, now=time.time()))

    # ---- output ----------------------------------------------------------------------------

    def _print_news(self, state: RunState) -> None:
        for text in state.notices[self._num_notices :]:
            self._write([f"notebook_accel: {text}"])
        self._num_notices = len(state.notices)
        fresh = [rank for rank in state.ranks if self._printed(rank).is_behind(rank)]
        if not fresh:
            return
        each = max(1, self._budget.available() // len(fresh))
        for rank in fresh:
            self._print_rank(rank, each, whole=state.has_ended)

    def _print_rank(self, rank: RankState, limit: int, *, whole: bool) -> None:
        lines, hidden = self._printed(rank).take(rank, limit, whole=whole)
        if hidden:
            self._write(
                [f"[rank {rank.rank}] … {hidden:,} lines not shown, whole in {self._where}"]
            )
        self._write([f"[rank {rank.rank}] {_clean(line)}" for line in lines])
        self._budget.spend(len(lines))

    def _printed(self, rank: RankState) -> _Printed:
        return self._ranks.setdefault(rank.rank, _Printed())

    @property
    def _where(self) -> str:
        return str(self._run.log_dir) if self._run is not None else ""

    def _write(self, lines: Sequence[str]) -> None:
        if lines:
            stream = self._stream if self._stream is not None else sys.stdout
            stream.write("\n".join(lines) + "\n")
            stream.flush()

    # ---- progress --------------------------------------------------------------------------

    def _print_progress(self, state: RunState) -> None:
        for rank in state.ranks[:_MAX_ROWS]:
            text = _progress(rank, self._pace.of(rank.rank))
            if text and self._printed(rank).is_new_progress(text):
                self._write([f"[rank {rank.rank}] {text}"])


class _Budget:
    """How many lines may be printed now: a bucket that fills up again with time."""

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left = float(burst)
        self._seen = time.monotonic()

    def available(self) -> int:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._seen) * self._per_second)
        self._seen = now
        return int(self._left)

    def spend(self, lines: int) -> None:
        self._left -= lines


class _Printed:
    """How far one rank's output was printed."""

    def __init__(self) -> None:
        self._num_lines = 0
        self._had_open_line = False
        self._progress = ""

    def is_behind(self, rank: RankState) -> bool:
        open_line = rank.open_line and rank.has_ended and not self._had_open_line
        return rank.num_lines > self._num_lines or open_line

    def take(self, rank: RankState, limit: int, *, whole: bool) -> tuple[list[str], int]:
        """The new lines, at most ``limit`` of them, and how many before them are left out.

        A line that was not ended yet is kept for later, unless this is the ``whole`` output.
        """
        ended = rank.tail[:-1] if rank.open_line else rank.tail
        num_new = rank.num_lines - self._num_lines
        lines = list(ended[-num_new:]) if num_new else []
        if rank.open_line and whole:
            lines.append(rank.tail[-1])
            num_new += 1
            self._had_open_line = True
        self._num_lines = rank.num_lines
        shown = lines[-limit:]
        return shown, num_new - len(shown)

    def is_new_progress(self, text: str) -> bool:
        before, self._progress = self._progress, text
        return text != before


def _clean(line: str) -> str:
    text = strip_escapes(line)
    return text if len(text) <= _MAX_WIDTH else text[:_MAX_WIDTH] + "…"


def _progress(rank: RankState, pace: float | None) -> str:
    far = advance(rank, pace=pace)
    if rank.has_ended or not far.count:
        return ""
    percent = "" if far.fraction is None else f"{far.fraction:.0%}"
    left = f"{far.remaining} left" if far.remaining else ""
    metrics = [f"{name} {wording.number(value)}" for name, (_, value) in rank.metrics.items()]
    parts = [far.label, percent, far.count, far.rate, left, *metrics[:8]]
    return "  ".join(part for part in parts if part)
