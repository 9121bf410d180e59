"""Counters of ranks in memory that the agent and its ranks share, and how all leave at one count.

A rank writes its own row, the agent reads all of them: counting a step costs a rank no system
call, and the agent sees progress even while a rank holds the GIL.

The board also carries the polite stop. A rank that waits in a collective for one that has left
would wait for ever, so all ranks of all agents leave at the same count. Ranks come to *points*:
a prepared loader gives a batch ("batches"), or the function reads ``should_stop`` ("reads").

    rank, at each point                       agent                        kernel
    row.batches = n    (it comes)
    is a stop asked?
      no: row.passed_batches = n, go on
      yes: row.waits_batches = n, wait        ask_stop()              <--  Stop
                                              passed() -> StopPoint   -->  leave_after(all points)
      n before the point: go on               leave_at(point)         <--  LeaveAt
      else: leave

Invariants:

- A rank writes ``batches`` BEFORE it reads the flag. ``FLAG_SECONDS`` after the flag is set, each
  row shows one of three: the rank has passed its newest point, waits there, or stands between the
  two writes; for the third ``passed`` returns None and is asked again. So no rank slips by unseen.
- From then on nobody passes a point before the answer: the highest point that was passed stays
  true, and the point after it has been passed by nobody, on no machine.
- All ranks come to the same points in the same order, so that one point is enough for all.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FLAG_SECONDS", "LeavePoint", "RankRow", "Scoreboard", "StopPoint", "leave_after"]

# How long to wait after the flag goes up until all rows are true: a processor may hold back the
# write of a rank that read the flag just before, for less than a microsecond.
FLAG_SECONDS = 0.001

# A rank that waits for the point looks so often: the others wait for it in their next collective.
_POLL_SECONDS = 0.0005
_COUNTERS = ("batches", "reads")
# The head of the board: whether a stop is asked, the counts at which ranks leave (0: unknown), and
# whether the ranks of other agents have ended their part of the call.
_ASKED, _LEAVE_BATCHES, _LEAVE_READS, _OTHERS_ENDED, _HEADER = range(5)
_NEVER = 2**62


@dataclass(frozen=True, kw_only=True)
class StopPoint:
    """Counts of the furthest batch and read that ranks of one agent have passed.

    Attributes:
        batches, reads: how often a rank went on from such a point.
        reads_should_stop: whether a rank ever came to read ``should_stop``.
    """

    batches: int = 0
    reads: int = 0
    reads_should_stop: bool = False


@dataclass(frozen=True, kw_only=True)
class LeavePoint:
    """The counts at which all ranks leave; ``batches`` is None if they leave at a read."""

    batches: int | None
    reads: int


def leave_after(points: Iterable[StopPoint]) -> LeavePoint:
    """Return the point right after the highest one that any rank has passed.

    If any rank reads ``should_stop``, the point is a read: batches go on, on all ranks, also on
    those that have not come to their first read yet.
    """
    points = tuple(points)
    reads = 1 + max((point.reads for point in points), default=0)
    if any(point.reads_should_stop for point in points):
        return LeavePoint(batches=None, reads=reads)
    return LeavePoint(batches=1 + max((point.batches for point in points), default=0), reads=reads)


class RankRow(ctypes.Structure):
    """The shared counters of one rank, written by the rank.

    The agent writes ``interrupted_call``, ``disconnected_call``, and ``call_over`` for a dead rank.

    Attributes:
        batches, steps, reads: how often it came to a batch, stepped, read ``should_stop``.
        total_batches, pass_start: batches of a pass, and ``batches`` before its first one.
        device_memory: in bytes.
        call_over: 1 once its part of the call is over: the rank sets it when its function has
            ended, before it sends the result, and the agent when its process has ended.
        passed_batches, passed_reads: the last point from which it went on.
        waits_batches, waits_reads: the last point at which it saw that a stop is asked.
        left_batches: 1 once its loop was ended.
        interrupted_call: number of the call that the agent interrupted last; a rank that reads that
            call only later sees it here.
        seen_interrupt: what ``interrupted_call`` was when the rank's main thread last saw a SIGINT.
        disconnected_call: number of the call in which the rank is to leave its group, if it is
            stuck.
    """

    batches: int
    total_batches: int
    pass_start: int
    steps: int
    reads: int
    device_memory: int
    call_over: int
    passed_batches: int
    passed_reads: int
    waits_batches: int
    waits_reads: int
    left_batches: int
    interrupted_call: int
    seen_interrupt: int
    disconnected_call: int

    # A structure of C, of the fields above: each step of a training writes here, and a Python
    # property would take three times as long.
    _fields_: ClassVar = [(name, ctypes.c_int64) for name in __annotations__]

    @property
    def leaving(self) -> bool:
        """Whether a stop needs nothing more of this rank, which ends by itself.

        Its loop was ended, or its function has read ``should_stop`` and decides when to return.
        """
        return bool(self.left_batches or self.waits_reads)


class Scoreboard:
    """Shared memory with a row of counters for each rank of this machine; forks inherit it."""

    def __init__(self, num_ranks: int, *, has_others: bool = False) -> None:
        """Create a scoreboard of zeros.

        Args:
            num_ranks: number of rows.
            has_others: whether the run has ranks behind other agents as well.
        """
        self.num_ranks = num_ranks
        self._has_others = has_others
        self._memory = mmap.mmap(-1, 8 * _HEADER + num_ranks * ctypes.sizeof(RankRow))
        self._view = memoryview(self._memory).cast("q")
        self.reset()

    def row(self, local_rank: int) -> RankRow:
        """Return the row of one rank."""
        return RankRow.from_buffer(self._memory, 8 * _HEADER + local_rank * ctypes.sizeof(RankRow))

    # ---- what the agent does ---------------------------------------------------------------

    def reset(self) -> None:
        """Zero all counters for a new call; no stop is asked for.

        The agent does it while no rank is in a call, so that nobody else writes meanwhile.
        """
        for index in range(len(self._view)):
            self._view[index] = 0
        self._view[_OTHERS_ENDED] = not self._has_others

    def note_others_ended(self) -> None:
        """Note that the ranks of all other agents have ended their part of the call."""
        self._view[_OTHERS_ENDED] = 1

    def ask_stop(self) -> None:
        """Ask for a stop: a rank that comes to a point waits there from now on."""
        self._view[_ASKED] = 1

    def passed(self, *, patient: bool = True) -> StopPoint | None:
        """Return the highest points that ranks here have passed, once a stop was asked for.

        Args:
            patient: give None while a rank has come to a point and not yet said whether it went
                on. With False it counts as having gone on: all leave one count later then, which
                is right as well.
        """
        rows = [row for row in map(self.row, range(self.num_ranks)) if not row.call_over]
        reads_should_stop = any(row.reads for row in rows)
        highest = {}
        for counter in _COUNTERS:
            counts = []
            for row in rows:
                came, passed = getattr(row, counter), getattr(row, f"passed_{counter}")
                if came not in (passed, getattr(row, f"waits_{counter}")):
                    # A rank that reads should_stop waits at none of its batches, and does not note
                    # that it went on.
                    if patient and not (reads_should_stop and counter == "batches"):
                        return None
                    passed = came
                counts.append(passed)
            highest[counter] = max(counts, default=0)
        return StopPoint(
            batches=highest["batches"], reads=highest["reads"], reads_should_stop=reads_should_stop
        )

    def leave_at(self, point: LeavePoint) -> None:
        """Release the waiting ranks to go on to ``point``, and leave there."""
        self._view[_LEAVE_READS] = point.reads
        self._view[_LEAVE_BATCHES] = _NEVER if point.batches is None else point.batches

    # ---- what a rank does ------------------------------------------------------------------

    @property
    def all_ended(self) -> bool:
        """Whether every rank of the run has ended its part of the call."""
        rows = map(self.row, range(self.num_ranks))
        return bool(self._view[_OTHERS_ENDED]) and all(row.call_over for row in rows)

    @property
    def stop_asked(self) -> bool:
        """Whether a stop was asked for, so that a rank waits at its next point."""
        return bool(self._view[_ASKED])

    def leaves(self, local_rank: int, counter: str) -> bool:
        """Wait until the stop point is known; return whether this rank leaves now.

        A rank calls it once it has counted and then seen ``stop_asked``. While no stop is asked,
        a rank that has counted sets ``passed_...`` itself.
        """
        row, index = self.row(local_rank), _LEAVE_BATCHES + _COUNTERS.index(counter)
        count: int = getattr(row, counter)
        setattr(row, f"waits_{counter}", count)
        # Not for ever: an agent that cannot learn the point interrupts its ranks, and a rank
        # whose agent has died is killed.
        while not self._view[index]:
            time.sleep(_POLL_SECONDS)
        if count < self._view[index]:
            setattr(row, f"passed_{counter}", count)
            return False
        if counter == "batches":
            row.left_batches = 1
        return True
