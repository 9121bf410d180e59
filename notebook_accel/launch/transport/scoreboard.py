"""Counters of ranks in memory that the agent and its ranks share.

A rank writes its own row, the agent reads all of them: counting a step costs a rank no system
call, and the agent sees progress even while a rank holds the GIL. The board also carries the
polite stop: each rank writes what it passed before it saw the stop, and all leave at one count.
"""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Row", "Scoreboard"]

_FIELDS = (
    "batches",
    "total_batches",
    "steps",
    "reads",
    "device_memory",
    "ended",
    "saw_batches",
    "saw_reads",
    "passed_batches",
    "passed_reads",
    "left_batches",
    "left_reads",
    "pass_start",
    "interrupted_call",
)
_HEADER = 1
_POLL_SECONDS = 0.0005


def _column(name: str) -> property:
    index = _FIELDS.index(name)

    def get(row: Row) -> int:
        return row.view[row.start + index]

    def put(row: Row, value: int) -> None:
        row.view[row.start + index] = value

    return property(get, put)


class Row:
    """The counters of one rank."""

    def __init__(self, view: memoryview, start: int) -> None:
        self.view = view
        self.start = start

    batches = _column("batches")
    total_batches = _column("total_batches")
    pass_start = _column("pass_start")
    steps = _column("steps")
    reads = _column("reads")
    device_memory = _column("device_memory")
    ended = _column("ended")
    passed_batches = _column("passed_batches")
    passed_reads = _column("passed_reads")
    interrupted_call = _column("interrupted_call")

    @property
    def leaving(self) -> bool:
        """Whether the rank leaves on its own: its loop ends, or it decides for itself."""
        return bool(self.get("left_batches") or self.get("saw_reads"))

    def get(self, name: str) -> int:
        return self.view[self.start + _FIELDS.index(name)]

    def set(self, name: str, value: int) -> None:
        self.view[self.start + _FIELDS.index(name)] = value


class Scoreboard:
    """One row a rank of this machine, in an anonymous mapping that forks inherit."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        size = 8 * (_HEADER + num_ranks * len(_FIELDS))
        self._view = memoryview(mmap.mmap(-1, size)).cast("q")

    def reset(self) -> None:
        """Begin a new call: no stop is asked, and nobody has counted anything.

        Called by the agent while no rank is in a call, so nobody else writes meanwhile.
        """
        for index in range(len(self._view)):
            self._view[index] = 0

    def row(self, local_rank: int) -> Row:
        return Row(self._view, _HEADER + local_rank * len(_FIELDS))

    @property
    def stop_asked(self) -> bool:
        return bool(self._view[0])

    def ask_stop(self) -> None:
        self._view[0] = 1

    def leaves(self, local_rank: int, counter: str, *, timeout: float) -> bool:
        """Whether this rank leaves its loop at the count that it has reached now.

        A rank calls it once it has counted. All leave at the first count that no rank had passed
        before it learned of the stop: a rank whose peer went on already must go on as well, or
        that peer waits for it in a collective for ever. Nobody waits for a rank that did not come
        so far; one that has counted and not decided yet is given ``timeout`` seconds. While no
        stop is asked, a rank that has counted sets ``passed_...`` itself.
        """
        mine = self.row(local_rank)
        count = mine.get(counter)
        if not mine.get(f"saw_{counter}"):
            mine.set(f"saw_{counter}", count)
        others = [self.row(index) for index in range(self.num_ranks) if index != local_rank]
        if self._has_been_passed(counter, count, others, timeout):
            mine.set(f"passed_{counter}", count)
            return False
        mine.set(f"left_{counter}", 1)
        return True

    @staticmethod
    def _has_been_passed(counter: str, count: int, others: Sequence[Row], timeout: float) -> bool:
        """Whether a rank went on beyond ``count``; waits for those that are about to say so."""
        deadline = time.monotonic() + timeout
        # At least one pause: what another processor wrote just now may not be seen at once.
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            alive = [row for row in others if not row.ended]
            if any(row.get(f"passed_{counter}") >= count for row in alive):
                return True
            if not any(_is_undecided(row, counter, count) for row in alive):
                return False
        return False


def _is_undecided(row: Row, counter: str, count: int) -> bool:
    return row.get(counter) >= count and not row.get(f"saw_{counter}")
