"""Counters of ranks in memory that the agent and its ranks share.

A rank writes its own row, the agent reads all of them: counting a step costs a rank no system
call, and the agent sees progress even while a rank holds the GIL. The board also carries the
polite stop: each rank writes at which count it first saw it, and all leave at the highest.
"""

from __future__ import annotations

import mmap
import time

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
    "leave_batches",
    "leave_reads",
    "pass_start",
)
_HEADER = 1
_POLL_SECONDS = 0.0005


def _column(index: int) -> property:
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

    batches = _column(0)
    total_batches = _column(1)
    steps = _column(2)
    reads = _column(3)
    device_memory = _column(4)
    ended = _column(5)
    pass_start = _column(_FIELDS.index("pass_start"))

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

    def row(self, local_rank: int) -> Row:
        return Row(self._view, _HEADER + local_rank * len(_FIELDS))

    @property
    def stop_asked(self) -> bool:
        return bool(self._view[0])

    def ask_stop(self) -> None:
        self._view[0] = 1

    def agree(self, local_rank: int, counter: str, *, timeout: float) -> bool:
        """Whether this rank has reached the count at which all leave.

        At its first call a rank says at which count of ``counter`` it saw the stop, and waits
        for the others to say so too; the highest of them is the count for all. Ranks that never
        come (they ended, or only one rank asks) are not waited for beyond ``timeout`` seconds.
        """
        mine = self.row(local_rank)
        count = mine.get(counter)
        if not mine.get(f"leave_{counter}"):
            mine.set(f"saw_{counter}", count)
            mine.set(f"leave_{counter}", self._highest(f"saw_{counter}", timeout))
        return count >= mine.get(f"leave_{counter}")

    def _highest(self, column: str, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        rows = [self.row(index) for index in range(self.num_ranks)]
        while time.monotonic() < deadline:
            if all(row.get(column) or row.ended for row in rows):
                break
            time.sleep(_POLL_SECONDS)
        return max(row.get(column) for row in rows)
