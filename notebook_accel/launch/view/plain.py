"""A view of a run as lines of text, for plain Python, output files, and notebooks run by programs.

Only the thread that waits for the run prints. A line budget, which limits the lines per second,
keeps a flood of output out of the cell: lines beyond the budget wait, or are only counted. The log
files in the run's folder have all lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO

from notebook_accel.launch.control.run_state import RankState, RunState
from notebook_accel.launch.run import Run
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line, plain_text
from notebook_accel.launch.view import View
from notebook_accel.launch.view.progress import Throughput, name_of, progress_lines
from notebook_accel.launch.view.step_times import step_lines
from notebook_accel.launch.view.summary import elapsed, hang_line, summary_lines
from notebook_accel.system.limits import TokenBucket


class LineReader:
    """Reads the output of one rank from successive states of its run, each line once."""

    def __init__(self) -> None:
        self._num_read = 0

    def has_news(self, rank: RankState, *, last: bool = False) -> bool:
        """Return whether :meth:`read` with the same arguments would return any line."""
        return rank.num_lines + (last and rank.open_line) != self._num_read

    def read(self, rank: RankState, *, last: bool = False) -> tuple[Sequence[str], int]:
        """Return the new lines that the state has, and the number of those that it lacks."""
        num_lines = rank.num_lines + (last and rank.open_line)
        if num_lines < self._num_read:  # the rank was started again
            self._num_read = 0
        num_new, self._num_read = num_lines - self._num_read, num_lines
        tail = rank.tail[:-1] if rank.open_line and not last else rank.tail
        lines = tail[-num_new:] if num_new else ()
        return lines, num_new - len(lines)


# Lines that are printed at once, and from then on; and between two about a rank's progress.
_BURST, _LINES_PER_SECOND, _PROGRESS_SECONDS = 400, 20.0, 10.0
# A line a rank every ten seconds: of 128 ranks that would be all there is to see.
_MAX_RANKS_WITH_PROGRESS = 16
# Metrics of a rank in the line about its progress, which is to stay one line of a terminal.
_MAX_METRICS = 8
# Different stacks of a hang: beyond these, run.stacks() has them all.
_MAX_STACKS = 8
# Characters of a line; of a longer one the start is shown, and the log has it whole.
_MAX_WIDTH = 2000
# A cell that ends within this time gets one line, and no table.
_SHORT_SECONDS = 1.0


class PlainOnDemand(View):
    """Prints nothing until ``run.show()`` asks for it, then how the run stands at that moment.

    Args:
        stream: where to print; None for ``sys.stdout``, looked up at each print.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def reopen(self, run: Run) -> None:
        self.write(summary_lines(run.state, now=run.state.now()))

    def show_displays(self, run: Run, rank: int) -> None:
        """Print, as text, what a rank displayed; only a notebook can show figures and HTML."""
        found = [one.data for one in run.state.ranks[rank].displays]
        texts = [data.get("text/plain", ", ".join(data)) for data in found]
        title = f"rank {rank} displayed, as text (a notebook draws it):"
        lines = [_printable(line) for text in texts for line in text.split("\n")]
        self.write([title, *lines] if texts else [f"rank {rank} displayed nothing"])

    def write(self, lines: Sequence[str]) -> None:
        if lines:
            stream = self._stream if self._stream is not None else sys.stdout
            stream.write("\n".join(lines) + "\n")
            stream.flush()


class PlainView(PlainOnDemand):
    """Prints ``[rank 0] text`` lines, progress and metrics now and then, at the end a summary."""

    is_shown = True

    def __init__(self, stream: TextIO | None = None, *, is_cell: bool = False) -> None:
        super().__init__(stream)
        self._budget = TokenBucket(_BURST, _LINES_PER_SECOND)
        self._is_cell = is_cell
        self._run: Run | None = None
        self._readers: dict[int, LineReader] = {}
        self._last_progress: dict[int, str] = {}
        self._notices: tuple[str, ...] = ()
        self._hang_text = ""
        self._throughput = Throughput()
        self._knows_slow = False
        self._next_progress = 0.0
        self._has_printed_end = False

    def waits_for_machines(self, text: str) -> None:
        self.write([text])

    def open(self, run: Run) -> None:
        self._run = run
        self._next_progress = time.monotonic() + _PROGRESS_SECONDS

    def poll(self) -> None:
        if self._run is None:
            return
        state = self._run.state
        now = time.monotonic()
        self._throughput.note(state, now=now)
        self._print_news(self._run, state)
        if now >= self._next_progress and state.status != "paused":
            self._next_progress = now + _PROGRESS_SECONDS
            self.print_progress(state)

    def print_end(self) -> None:
        if self._run is None or self._has_printed_end:
            return
        self._has_printed_end = True
        self._print_news(self._run, self._run.state)
        self.print_summary(self._run)

    # ---- what other views of text do in their own way --------------------------------------

    def print_output(self, run: Run, state: RunState) -> None:
        """Print the ranks' new output, as far as the line budget allows.

        The ranks with new lines share the budget: each rank's newest lines are printed, its other
        lines only counted. If the budget has less than one line for each of these ranks, all new
        lines wait in the run's state for the next call; after the end of the run, one line of each
        rank is printed then.
        """
        news: list[tuple[RankState, LineReader]] = []
        for rank in state.ranks:
            reader = self._readers.setdefault(rank.rank, LineReader())
            if reader.has_news(rank, last=state.has_ended):
                news.append((rank, reader))
        # What may be printed now is shared by the ranks that have something to say.
        share = self._budget.available() // max(1, len(news))
        if share <= 0 and not state.has_ended:
            return
        for rank, reader in news:
            new, num_missing = reader.read(rank, last=state.has_ended)
            lines = [_printable(line) for line in new[-max(1, share) :]]
            num_missing += len(new) - len(lines)
            if num_missing:
                noun = "line" if num_missing == 1 else "lines"
                lines.insert(0, f"… {num_missing:,} {noun} not shown, whole in {run.log_dir}")
            self.write([f"[rank {rank.rank}] {line}" for line in lines])
            self._budget.take(len(lines))

    def print_progress(self, state: RunState) -> None:
        """Print one line per rank whose progress has changed, for ranks 0 to 15 only.

        What slows the steps down is printed once.

        It is called every ten seconds.
        """
        slow = step_lines(state)
        if slow and not self._knows_slow:
            self._say(slow)
        self._knows_slow = self._knows_slow or bool(slow)
        for rank in state.ranks[:_MAX_RANKS_WITH_PROGRESS]:
            text = _progress(rank, self._throughput.of(rank.rank))
            if text and text != self._last_progress.get(rank.rank):
                self._last_progress[rank.rank] = text
                self.write([f"[rank {rank.rank}] {text}"])

    def print_summary(self, run: Run) -> None:
        lines = summary_lines(run.state, now=run.state.now())
        self.write(lines[:1] if self.is_short_cell(run) else lines)

    def is_short_cell(self, run: Run) -> bool:
        """Return whether the run is a cell (``%%accelerate``) and has taken less than a second."""
        return self._is_cell and elapsed(run.state, run.state.now()) < _SHORT_SECONDS

    # ---- output ----------------------------------------------------------------------------

    def _say(self, lines: Iterable[str]) -> None:
        self.write([f"notebook_accel: {line}" for line in lines])

    def _print_news(self, run: Run, state: RunState) -> None:
        new = [text for text in state.notices if text not in self._notices]
        self._say(one_line(text, _MAX_WIDTH) for text in new)
        self._notices = state.notices
        # In a hang, ranks wait for one another in vain, or a rank's process is suspended.
        hang = state.hang
        before, self._hang_text = self._hang_text, hang.text if hang else ""
        if hang is not None and hang.text != before:
            self._say([hang_line(state)])
            for ranks, stack in hang.stacks[:_MAX_STACKS] if hang.is_certain else ():
                self.write([f"stack of {wording.rank_list(ranks)}:", plain_text(stack.rstrip())])
        self.print_output(run, state)


def _printable(line: str) -> str:
    text = plain_text(line)
    return text if len(text) <= _MAX_WIDTH else text[:_MAX_WIDTH] + "…"


def _progress(rank: RankState, throughput: float | None) -> str:
    """Return a rank's progress as one line of text; "" if there is none, or the rank has ended."""
    lines = progress_lines(rank, throughput=throughput)
    if rank.has_ended or not lines[0].count:
        return ""
    parts: list[str] = []
    for line in lines:
        percent = "" if line.fraction is None else f"{line.fraction:.0%}"
        left = f"{line.remaining} left" if line.remaining else ""
        parts += [line.label, percent, line.count, line.rate, left]
    metrics = list(rank.metrics.items())[:_MAX_METRICS]
    parts += [f"{name_of(name)} {wording.number(value)}" for name, (_, value) in metrics]
    return "  ".join(part for part in parts if part)
