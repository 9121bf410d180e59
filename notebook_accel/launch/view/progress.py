"""How far each rank is, in words that every view shows: one line for each of its progress bars.

A rank that draws bars (tqdm, ``accelerator.progress``) is described by them; one that draws none,
by what its prepared loaders and optimizers counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.launch.control.curves import NotFinite
    from notebook_accel.launch.control.state import BarState, RankState, RunState

__all__ = [
    "ProgressLine",
    "Throughput",
    "counted_items",
    "current_bars",
    "last_values",
    "memory_of",
    "most_lines",
    "name_of",
    "named_lines",
    "not_finite_note",
    "progress_lines",
    "progress_text",
]

# Throughput is the mean over this window: long enough to be calm, short enough to be news.
_WINDOW_SECONDS = 5.0
# Below this the mean of a window says nothing.
_MIN_WINDOW_SECONDS = 0.5
# Characters of what programs name freely: a metric, a bar's name or postfix, its unit.
_MAX_NAME = 40
_MAX_LABEL = 200
_MAX_UNIT = 20
# Seconds: a time left of more than three years is no forecast.
_MAX_LEFT = 1e8
# Deeper nesting is not shown; nobody draws it.
_MAX_DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class ProgressLine:
    """How far one bar of a rank is.

    Attributes:
        label: what advances ("epoch 2", "steps"); "" where nothing is known yet.
        fraction: 0 to 1, None where the end is unknown.
        count: "130/200" or "1,240".
        rate: "12.3 it/s", or "".
        remaining: "0:05"; only the outermost bar of a rank has it, since the person waits for
            that one.
        text: label and count in one phrase.
    """

    label: str = ""
    fraction: float | None = None
    count: str = ""
    rate: str = ""
    remaining: str = ""
    text: str = ""


def progress_lines(rank: RankState, *, throughput: float | None = None) -> list[ProgressLine]:
    """One line a bar, the outermost first; a single line for a rank that draws no bar.

    Args:
        rank: the rank.
        throughput: items of :func:`counted_items` a second, for a rank that draws no bar.
    """
    bars = current_bars(rank.bars)
    if not bars:
        return [_line_of_counters(rank, throughput)]
    lines = [_line_of_bar(bar) for bar in bars]
    if bars[0].closed or rank.has_ended:
        return lines
    left = _seconds_left(bars)
    return [replace(lines[0], remaining=_remaining(left)), *lines[1:]]


def named_lines(rank: RankState, *, throughput: float | None = None) -> list[ProgressLine]:
    """Return the progress lines that a summary names.

    Of a rank that returned the outermost bar says it all ("epochs: 3/3"); where another one ended,
    the inner bars say where ("epochs: 1/3, train: 20/100").
    """
    lines = progress_lines(rank, throughput=throughput)
    return lines[:1] if rank.returned else lines


def progress_text(rank: RankState, *, throughput: float | None = None) -> str:
    """Return the progress of a rank as one phrase: ``epochs: 1/3, train: 20/100``."""
    lines = named_lines(rank, throughput=throughput)
    return ", ".join(line.text for line in lines if line.text)


def most_lines(rank: RankState) -> int:
    """The most lines that :func:`progress_lines` has given of a rank so far."""
    return min(_MAX_DEPTH, max(map(len, _nested_bars(rank.bars)), default=1))


def current_bars(bars: Sequence[BarState]) -> list[BarState]:
    """The newest bar, and the bars around it, outermost first.

    A bar that was closed stays until another one of its depth is opened: between two epochs the
    view would flicker otherwise.
    """
    nested = _nested_bars(bars)
    return nested[-1][:_MAX_DEPTH] if nested else []


def _nested_bars(bars: Sequence[BarState]) -> list[list[BarState]]:
    """For each bar, the bars around it when it was the newest one, outermost first, and itself."""
    nested: list[list[BarState]] = []
    for bar in bars:
        # In order of opening: whatever came before at this depth or deeper is over.
        before = nested[-1] if nested else []
        nested.append([*(outer for outer in before if outer.depth < bar.depth), bar])
    return nested


def _line_of_bar(bar: BarState) -> ProgressLine:
    parts = (one_line(bar.name, _MAX_LABEL), one_line(bar.postfix, _MAX_LABEL))
    label = ", ".join(part for part in parts if part)
    count = _count_of(bar.n, bar.total)
    return ProgressLine(
        label=label,
        fraction=_fraction(bar.n, bar.total),
        count=count,
        rate=wording.rate(bar.rate or 0.0, one_line(bar.unit, _MAX_UNIT)),
        text=f"{label}: {count}" if label else count,
    )


def _remaining(seconds: float | None) -> str:
    # Of a total that is infinite, or no number, there is none.
    return wording.clock(seconds) if seconds is not None and seconds < _MAX_LEFT else ""


def _seconds_left(bars: Sequence[BarState]) -> float | None:
    """Seconds until the outermost of nested bars is full; None where nobody knows.

    An outer bar moves rarely: the bar inside it says how far the item is that it works on, and
    how long one takes while none has been finished yet.

    Args:
        bars: the outermost bar, and the bars inside it.
    """
    outer, inner = bars[0], bars[1:]
    if outer.total is None or outer.n >= outer.total:
        return None
    if not inner:
        return (outer.total - outer.n) / outer.rate if outer.rate else None
    left_of_item = _seconds_left(inner)
    if left_of_item is None:
        return (outer.total - outer.n) / outer.rate if outer.rate else None
    if outer.rate:
        seconds_an_item = 1 / outer.rate
    elif inner[0].total and inner[0].rate:
        seconds_an_item = inner[0].total / inner[0].rate
    else:
        return None
    return left_of_item + max(0.0, outer.total - outer.n - 1) * seconds_an_item


def counted_items(rank: RankState) -> tuple[int, str]:
    """How many items a rank has counted, and what one is: batches, or steps where it takes none.

    The one place that chooses: the rate in the panel's title, the bar of a rank that draws none,
    and the order of the slowest ranks go by it.
    """
    return (rank.batches, "batch") if rank.batches else (rank.steps, "step")


def _line_of_counters(rank: RankState, throughput: float | None) -> ProgressLine:
    value, unit = counted_items(rank)
    if not value:
        return ProgressLine(fraction=1.0 if rank.returned and rank.is_asked else None)
    total = rank.total_batches or None
    # Batches are counted over all epochs, and the loader's length is that of one.
    done = rank.batches - rank.pass_start if total else value
    count = _count_of(done, total)
    steps = f"{wording.count(rank.steps)} steps" if rank.steps else ""
    batches = f"{count} batches" if rank.batches else ""
    is_over = rank.has_ended or total is None or not throughput or done >= total
    return ProgressLine(
        label=steps if steps and batches else ("steps" if steps else "batches"),
        fraction=1.0 if rank.returned else _fraction(done, total),
        count=count,
        rate=wording.rate(throughput or 0.0, unit),
        remaining="" if is_over else _remaining((total - done) / throughput),  # type: ignore[operator]
        text=", ".join(part for part in (steps, batches) if part),
    )


def _count_of(n: float, total: float | None) -> str:
    return wording.count(n) if total is None else f"{wording.count(n)}/{wording.count(total)}"


def _fraction(n: float, total: float | None) -> float | None:
    return None if not total else min(1.0, max(0.0, n / total))


class Throughput:
    """How many items of :func:`counted_items` each rank does a second, over the last seconds."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, int]]] = {}

    def note(self, state: RunState, *, now: float) -> None:
        """Add a sample of the ranks' counts at time ``now`` (seconds of any clock)."""
        for rank in state.ranks:
            samples = self._samples.setdefault(rank.rank, deque())
            value, _ = counted_items(rank)
            if samples and value < samples[-1][1]:
                # The rank began to take batches: what was counted before were steps.
                samples.clear()
            samples.append((now, value))
            while len(samples) > 2 and samples[1][0] <= now - _WINDOW_SECONDS:
                samples.popleft()

    def of_run(self, state: RunState) -> tuple[float, str] | None:
        """Items a second of a rank in the mean, and what one is; None while too little is known.

        It is the mean over the ranks that have not ended. Where none of these takes batches or
        makes steps that are counted, it is the mean rate of their innermost bars.
        """
        going = [rank for rank in state.ranks if not rank.has_ended]
        rates = {rank.rank: rate for rank in going if (rate := self.of(rank.rank))}
        if rates:
            _, unit = counted_items(state.ranks[min(rates)])
            return sum(rates.values()) / len(rates), unit
        bars = [current_bars(rank.bars)[-1] for rank in going if rank.bars]
        of_bars = [bar.rate for bar in bars if bar.rate]
        if not of_bars:
            return None
        return sum(of_bars) / len(of_bars), one_line(bars[0].unit, _MAX_UNIT)

    def of(self, rank: int) -> float | None:
        """Items a second of ``rank``, None while too little is known."""
        samples = self._samples.get(rank)
        if not samples or samples[-1][0] - samples[0][0] < _MIN_WINDOW_SECONDS:
            return None
        return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])


def name_of(metric: str) -> str:
    """The name of a metric, short and without what would garble a page or a terminal."""
    return one_line(metric, _MAX_NAME)


def memory_of(rank: RankState) -> str:
    """Memory of the rank's device, or of its process where that is unknown; "" for neither."""
    used = rank.device_memory or rank.memory
    return wording.memory(used) if used else ""


def last_values(state: RunState) -> dict[str, str]:
    """Last value of each metric as text, in the order in which the names first came.

    They are rank 0's, whose values ``accelerator.log`` keeps.
    """
    return {name: wording.number(value) for name, (_, value) in state.ranks[0].metrics.items()}


def not_finite_note(found: NotFinite) -> str:
    """Return a chart's note on values that are not finite, "not finite since step 41", or ""."""
    if found.since is not None:
        return f"not finite since step {wording.count(found.since)}"
    verb = "value is" if found.count == 1 else "values are"
    return f"{found.count:,} {verb} not finite" if found.count else ""
