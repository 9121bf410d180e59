"""A run in a few facts: the table that every view shows at the end, and how it folds."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from notebook_accel.launch.view import wording
from notebook_accel.launch.view.outline import advance, last_values, memory_of, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_accel.launch.control.state import RankState, RunState

__all__ = ["COLUMNS", "SIGNS", "elapsed", "facts", "folded", "size", "summarise", "worth_a_row"]

COLUMNS = ("rank", "state", "progress", "rate", "memory")
SIGNS = {"succeeded": "✓", "failed": "✗", "stopped": "■"}
_MAX_ROWS = 16
_MAX_PROGRESS = 100


def elapsed(state: RunState, now: float) -> float:
    """Seconds that the run took, or has taken until ``now`` (wall time)."""
    return max(0.0, (state.ended or now) - state.started)


def size(state: RunState) -> str:
    """``2 ranks``."""
    return f"{state.world_size} rank{'s' if state.world_size != 1 else ''}"


def worth_a_row(ranks: Sequence[RankState]) -> Sequence[RankState]:
    """The ranks that get a row: all where they fit, else the failed ones and the first ones."""
    if len(ranks) <= _MAX_ROWS:
        return ranks
    first = sorted(ranks, key=lambda rank: (rank.status != "failed", rank.rank))
    return sorted(first[: _MAX_ROWS // 2], key=lambda rank: rank.rank)


def folded(ranks: Sequence[RankState], shown: Iterable[RankState]) -> str:
    """One line for ranks that have no row: ``… and 96 more: 93 running, 3 failed``; or nothing."""
    seen = {rank.rank for rank in shown}
    hidden = Counter(rank.status for rank in ranks if rank.rank not in seen)
    if not hidden:
        return ""
    parts = [f"{number} {status}" for status, number in hidden.most_common()]
    return f"… and {hidden.total()} more: {', '.join(parts)}"


def facts(rank: RankState, seconds: float) -> tuple[str, str, str, str, str]:
    """What a summary says of a rank after ``seconds``, in the order of :data:`COLUMNS`."""
    items = rank.batches or rank.steps
    far = advance(rank, pace=items / seconds if seconds > 0 else None)
    how = f"{SIGNS.get(rank.status, '●')} {rank.status}"
    return str(rank.rank), how, far.text[:_MAX_PROGRESS], far.rate, memory_of(rank)


def summarise(state: RunState, *, now: float) -> list[str]:
    """The run as lines of text: a title, a row a rank, the metrics' last values.

    Args:
        state: the run's state.
        now: wall time in seconds, for a run that goes on.
    """
    seconds = elapsed(state, now)
    shown = worth_a_row(state.ranks)
    rest = folded(state.ranks, shown)
    return [
        f"{state.name}: {state.status}, {size(state)}, {wording.span(seconds)}",
        *_aligned([COLUMNS, *(facts(rank, seconds) for rank in shown)]),
        *([rest] if rest else []),
        *(_metric(name, by_rank) for name, by_rank in last_values(state).items()),
    ]


def _metric(name: str, by_rank: dict[int, float]) -> str:
    return f"{name}: {spread(by_rank) or wording.number(next(iter(by_rank.values())))}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
