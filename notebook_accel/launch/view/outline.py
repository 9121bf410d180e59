"""What every view says of a run, in words: how far its ranks are, their memory and metrics."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accel.launch.view import wording

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_accel.launch.control.state import BarState, RankState, RunState

__all__ = ["Advance", "Pace", "advance", "last_values", "memory_of", "spread"]

_PACE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Advance:
    """How far a rank is.

    Attributes:
        label: what advances ("epoch 2", "steps"); "" where nothing is known yet.
        fraction: 0 to 1, None where the end is unknown.
        count: "130/200" or "1,240".
        rate: "12.3 it/s", or "".
        remaining: "0:05", or "".
        text: label and count in one phrase.
    """

    label: str = ""
    fraction: float | None = None
    count: str = ""
    rate: str = ""
    remaining: str = ""
    text: str = ""


def advance(rank: RankState, *, pace: float | None = None) -> Advance:
    """How far ``rank`` is: by its newest bar, else by what its loaders and optimizers counted.

    Args:
        rank: the rank.
        pace: batches (else steps) a second, for a rank that draws no bar.
    """
    if rank.bars:
        return _by_bar(rank)
    return _by_count(rank, pace)


def _by_bar(rank: RankState) -> Advance:
    # The newest bar is kept once closed: between two epochs the row would flicker otherwise.
    bar = rank.bars[-1]
    outer = [_position(bar) for bar in rank.bars[:-1] if not bar.closed]
    label = ", ".join(part for part in [bar.name, bar.postfix, *reversed(outer)] if part)
    count = _of(bar.n, bar.total)
    is_over = bar.closed or rank.has_ended
    return Advance(
        label=label,
        fraction=_fraction(bar.n, bar.total),
        count=count,
        rate=wording.rate(bar.rate or 0.0, bar.unit),
        remaining="" if is_over else _time_left(bar.n, bar.total, bar.rate),
        text=f"{label}: {count}" if label else count,
    )


def _position(bar: BarState) -> str:
    return f"{bar.name} {_of(bar.n, bar.total)}".strip()


def _by_count(rank: RankState, pace: float | None) -> Advance:
    unit, value = ("batch", rank.batches) if rank.batches else ("step", rank.steps)
    if not value:
        return Advance(fraction=1.0 if rank.returned else None)
    total = rank.total_batches or None
    done = rank.batches - rank.pass_start if total else value
    return Advance(
        label=_what(rank),
        fraction=1.0 if rank.returned else _fraction(done, total),
        count=_of(done, total),
        rate=wording.rate(pace or 0.0, unit),
        remaining="" if rank.has_ended else _time_left(done, total, pace),
        text=_counted(rank, done, total),
    )


def _what(rank: RankState) -> str:
    if not rank.steps:
        return "batches"
    return f"{wording.count(rank.steps)} steps" if rank.batches else "steps"


def _counted(rank: RankState, done: float, total: float | None) -> str:
    steps = f"{wording.count(rank.steps)} steps" if rank.steps else ""
    batches = f"{_of(done, total)} batches" if rank.batches else ""
    return ", ".join(part for part in (steps, batches) if part)


def _of(n: float, total: float | None) -> str:
    return wording.count(n) if total is None else f"{wording.count(n)}/{wording.count(total)}"


def _fraction(n: float, total: float | None) -> float | None:
    return None if not total else min(1.0, max(0.0, n / total))


def _time_left(n: float, total: float | None, per_second: float | None) -> str:
    if total is None or not per_second or n >= total:
        return ""
    return wording.clock((total - n) / per_second)


class Pace:
    """Batches, else steps, a second of each rank, over the last seconds."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, int]]] = {}

    def see(self, state: RunState, *, now: float) -> None:
        """Take the ranks' counts at ``now`` (seconds)."""
        for rank in state.ranks:
            seen = self._seen.setdefault(rank.rank, deque())
            value = rank.batches or rank.steps
            if seen and value < seen[-1][1]:
                seen.clear()
            seen.append((now, value))
            while len(seen) > 2 and seen[1][0] <= now - _PACE_SECONDS:
                seen.popleft()

    def of(self, rank: int) -> float | None:
        """Items a second of ``rank``, None while too little is known."""
        seen = self._seen.get(rank)
        if not seen or seen[-1][0] - seen[0][0] < 0.5:
            return None
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def memory_of(rank: RankState) -> str:
    """Memory of the rank's device, or of its process where that is unknown."""
    used = rank.device_memory or rank.memory
    return wording.memory(used) if used else ""


def last_values(state: RunState) -> dict[str, dict[int, float]]:
    """Last value of each metric by rank, in the order in which the names first came."""
    values: dict[str, dict[int, float]] = {}
    for rank in state.ranks:
        for name, (_, value) in rank.metrics.items():
            values.setdefault(name, {})[rank.rank] = value
    return values


def spread(by_rank: Mapping[int, float]) -> str:
    """Lowest and highest value where ranks differ, else nothing."""
    low, high = (wording.number(pick(by_rank.values())) for pick in (min, max))
    return "" if low == high else f"{low} to {high}"
