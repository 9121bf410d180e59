"""The progress of each rank as text, which all views show: a line for each progress bar of a rank.

A rank that draws bars (tqdm, ``accelerator.progress``) has the progress of its bars. A rank that
draws no bar has a line about the batches and steps of its prepared loaders and optimizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from notebook_accel.launch.control.curves import Curve
from notebook_accel.launch.control.run_state import BarState, RankState, RunState
from notebook_accel.launch.text import wording
from notebook_accel.launch.text.terminal_text import one_line

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
    """The progress of one bar of a rank, or of its batches and steps, as texts for a view.

    Attributes:
        label: what advances ("epoch 2", "steps"); "" if nothing is known yet.
        fraction: the part that is done, 0 to 1; None if the end is unknown.
        count: number of items done ("130/200" or "1,240"); "" if nothing is known yet.
        rate: "12.3 it/s"; "" if unknown.
        remaining: time left, "0:05"; "" if unknown. Of several bars, only the outermost has a time,
            since the user waits for its end.
    """

    label: str = ""
    fraction: float | None = None
    count: str = ""
    rate: str = ""
    remaining: str = ""
    text: str = ""


def progress_lines(rank: RankState, *, throughput: float | None = None) -> list[ProgressLine]:
    """Return one line for each current bar of a rank (:func:`current_bars`), the outermost first.

    A rank that draws no bar has a single line, about its batches and steps. So has a rank that
    trains after its bars were closed, if it did not train under them: they were about its data or
    its weights.

    Args:
        throughput: batches or steps per second (:func:`counted_items`), for a rank that draws no
            bar; None if unknown.
    """
    bars = current_bars(rank.bars)
    if not bars or (bars[0].closed and bars[0].opened_at == bars[0].changed_at < rank.trained):
        return [_line_of_counters(rank, throughput)]
    lines = [_line_of_bar(bar) for bar in bars]
    if bars[0].closed or rank.has_ended:
        return lines
    left = _seconds_left(bars)
    return [replace(lines[0], remaining=_remaining(left)), *lines[1:]]


def named_lines(rank: RankState, *, throughput: float | None = None) -> list[ProgressLine]:
    """Return the progress lines of a rank that a summary shows.

    If the rank's function returned, only the line of the outermost bar is returned ("epochs: 3/3").
    If it did not return, the lines of all bars are returned, since the inner bars tell how far the
    rank came ("epochs: 1/3, train: 20/100").
    """
    lines = progress_lines(rank, throughput=throughput)
    return lines[:1] if rank.returned else lines


def progress_text(rank: RankState, *, throughput: float | None = None) -> str:
    """Return the progress of a rank as one phrase: ``epochs: 1/3, train: 20/100``."""
    lines = named_lines(rank, throughput=throughput)
    return ", ".join(line.text for line in lines if line.text)


def most_lines(rank: RankState) -> int:
    """Return the largest number of lines that :func:`progress_lines` could return so far.

    A panel keeps room for this number of lines of the rank, so that its height does not change.
    """
    return min(_MAX_DEPTH, max(map(len, _nested_bars(rank.bars)), default=1))


def current_bars(bars: Sequence[BarState]) -> list[BarState]:
    """Return the newest bar and the bars around it, the outermost first; four at most.

    A closed bar is returned until another bar opens at the same depth or further out: otherwise
    the view would flicker between two epochs.
    """
    nested = _nested_bars(bars)
    return nested[-1][:_MAX_DEPTH] if nested else []


def _nested_bars(bars: Sequence[BarState]) -> list[list[BarState]]:
    """Return for each bar a list: the bars around it, the outermost first, and the bar itself."""
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
    """Return the seconds until the outermost of nested bars is full; None if unknown or full."""
    outer, inner = bars[0], bars[1:]
    if outer.total is None or outer.n >= outer.total:
        return None
    left_of_item = _seconds_left(inner) if inner else None
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
    """Return how many batches a rank has counted, and "batch".

    If the rank has counted no batches, return the number of its steps, and "step". All views count
    in this way: for the rate in the panel's title, for the line of a rank that draws no bar, and to
    put the slowest ranks first.
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
    """Measures how many batches or steps each rank does per second, over the newest five seconds.

    :func:`counted_items` chooses between batches and steps.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, list[int]]] = deque()

    def note(self, state: RunState, *, now: float) -> None:
        """Add a sample of the ranks' counts at time ``now`` (seconds of any clock)."""
        counts = [counted_items(rank)[0] for rank in state.ranks]
        samples = self._samples
        if samples and any(map(int.__lt__, counts, samples[-1][1])):
            # A rank began to take batches: what was counted before were steps.
            samples.clear()
        samples.append((now, counts))
        while len(samples) > 2 and samples[1][0] <= now - _WINDOW_SECONDS:
            samples.popleft()

    def of_run(self, state: RunState) -> tuple[float, str] | None:
        """Return the items per second of a rank, and the unit of the items; None while unknown.

        The rate is a mean over the ranks that have not ended. If no rate of batches or steps is
        known for these ranks, it is the mean rate of their innermost bars.
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
        """Return the batches or steps per second of ``rank``; None while there are few samples."""
        if not self._samples:
            return None
        (start, before), (now, counts) = self._samples[0], self._samples[-1]
        if now - start < _MIN_WINDOW_SECONDS:
            return None
        return (counts[rank] - before[rank]) / (now - start)


def name_of(metric: str) -> str:
    """Return a metric's name without characters that garble a page or terminal, cut if long."""
    return one_line(metric, _MAX_NAME)


def memory_of(rank: RankState) -> str:
    """Return a rank's memory and where it is: "2 GB on device"; if unknown, "1 GB on host".

    Of a rank that has ended it is the peak on its device. The text is "" if both are unknown.
    """
    if rank.has_ended and rank.device_peak:
        return f"{wording.memory(rank.device_peak)} on device, at its peak"
    if rank.device_memory:
        return f"{wording.memory(rank.device_memory)} on device"
    return f"{wording.memory(rank.memory)} on host" if rank.memory else ""


def last_values(state: RunState) -> dict[str, str]:
    """Return the newest value of each metric as text, in the order in which they first came.

    They are the values of rank 0, since ``accelerator.log`` reports values on rank 0 alone.
    """
    return {name: wording.number(value) for name, (_, value) in state.ranks[0].metrics.items()}


def not_finite_note(curve: Curve) -> str:
    """Return a note below the chart of a metric with infinite or NaN values; "" if it has none.

    For example "not finite since step 41" if no value from step 41 on is finite; otherwise "3
    values are not finite".
    """
    number, since = curve.num_not_finite, curve.not_finite_since
    if since is not None:
        return f"not finite since step {wording.count(since)}"
    verb = "value is" if number == 1 else "values are"
    return f"{number:,} {verb} not finite" if number else ""
