"""Counters in memory that the agent and its ranks share, and how all ranks stop at one point.

Each rank writes its own row, the agent of its machine reads all of them. So counting a step costs a
rank no system call, and the agent sees progress even while a rank holds the GIL.

The scoreboard also coordinates a polite stop: the ranks leave their training loops by themselves.
If one rank left earlier than another, the other would wait for it in a collective for ever. So all
ranks of all agents leave at the same *point*. A rank comes to a point whenever a prepared data
loader gives a batch (counted in "batches"), or the user's function reads ``should_stop`` (counted
in "reads"). For a rank that has read ``should_stop``, only its reads are points. In a loop without
a prepared loader, the beginnings of optimizer steps are (counted in "begun"). An interrupt of ranks
whose devices work asynchronously brings them to one point as well: their devices could not end what
only some ranks have queued.

    rank, at each point                       agent                        kernel
    row.batches = n    (it comes)
    is a stop asked?
      no: row.passed_batches = n, go on
      yes: row.waits_batches = n, wait        ask_stop()              <--  Stop
                                              passed() -> StopPoint   -->  leave_after(all points)
      n before the point: go on               leave_at(point)         <--  LeaveAt
      else: leave

Invariants:

- A rank writes ``batches`` BEFORE it reads the flag by which the agent asks for a stop.
  ``FLAG_SECONDS`` after the agent has set the flag, each row shows one of three states: the rank
  has passed its newest point; it waits at that point; or it has not written yet which of the two.
  In the third state ``passed`` returns None and the agent asks again, for a second at most; then it
  takes the point for passed. So no rank passes a point unseen.
- From then on no rank passes a point until ``leave_at`` is called. So the highest passed point
  stays correct, and no rank on any machine has passed the point after it.
- All ranks come to the same points in the same order, so that one point is enough for all.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from notebook_accel.launch.wire import StepTimes

if TYPE_CHECKING:
    from collections.abc import Iterable

# How long to wait after the flag goes up until all rows are true: a processor may hold back the
# write of a rank that read the flag just before, for less than a microsecond.
FLAG_SECONDS = 0.001

# A rank that waits for the point looks so often: the others wait for it in their next collective.
_POLL_SECONDS = 0.0005
_COUNTERS = ("batches", "reads", "begun")
# The head of the board: whether a stop is asked (2: an interrupt), the counts at which ranks leave
# (0: unknown), and whether the ranks of other agents have ended their part of the call.
_ASKED, _LEAVE_BATCHES, _LEAVE_READS, _LEAVE_BEGUN, _OTHERS_ENDED, _HEADER = range(6)
_NEVER = 2**62
_STEP_TIMES = ctypes.c_int64 * len(StepTimes.__struct_fields__)


@dataclass(frozen=True, kw_only=True)
class StopPoint:
    """An agent's answer to a stop request: how far its ranks have come in this call.

    Attributes:
        batches: the highest batch count at which any rank of the agent went on with its loop.
        reads: the highest count of ``should_stop`` reads at which any rank of the agent went on.
        begun: the highest count of optimizer steps, without a loader, that any rank has begun.
        reads_should_stop: whether any rank has read ``should_stop`` in this call.
    """

    batches: int = 0
    reads: int = 0
    begun: int = 0
    reads_should_stop: bool = False


@dataclass(frozen=True, kw_only=True)
class LeavePoint:
    """Where all ranks leave their loops in a polite stop; see the module's docstring.

    Attributes:
        batches: number, from 1, of the batch that the loader no longer gives; None if the ranks
            leave at a read of ``should_stop`` instead.
        reads: number, from 1, of the read at which ``should_stop`` becomes True.
        begun: number, from 1, of the optimizer step that is not made in a loop without a loader.
    """

    batches: int | None
    reads: int
    begun: int = 1


def leave_after(points: Iterable[StopPoint]) -> LeavePoint:
    """Return where all ranks leave: right after the furthest point that any rank has passed.

    Called in the kernel. If any rank has read ``should_stop``, all ranks leave at a read of it.
    Then no loop is ended at a batch, not even on a rank that has not read ``should_stop``.

    Args:
        points: the answers of all agents.
    """
    points = tuple(points)
    reads = 1 + max((point.reads for point in points), default=0)
    if any(point.reads_should_stop for point in points):
        return LeavePoint(batches=None, reads=reads)
    batches = 1 + max((point.batches for point in points), default=0)
    begun = 1 + max((point.begun for point in points), default=0)
    return LeavePoint(batches=batches, reads=reads, begun=begun)


class RankRow(ctypes.Structure):
    """The counters of one rank in shared memory, all 0 when a call begins.

    The agent writes ``interrupted_call`` and ``disconnected_call``, and, if the rank's process has
    ended, ``call_over``. The rank writes all others.

    Attributes:
        batches, steps, reads: numbers, in this call, of batches that the rank has got or is about
            to get, of its optimizer steps, and of its reads of ``should_stop``.
        total_batches: length of the current pass through the loader, in batches; 0 if unknown.
        pass_start: value of ``batches`` before the first batch of the current pass.
        device_memory, device_peak, device_limit: bytes in use on the rank's device, as torch counts
            them, the most so far, and how many torch could use; 0 if unknown.
        step_times: the fields of ``wire.StepTimes``, in their order.
        call_over: 1 once the rank's part of the call is over. The rank sets it when its function
            has ended, before it sends the result; the agent sets it when the process has ended.
        begun: number of optimizer steps that the rank has begun without a prepared loader.
        passed_batches, passed_reads, passed_begun: value of that count when the rank last went on
            with its loop.
        waits_batches, waits_reads, waits_begun: value of that count when the rank last saw that a
            stop is asked, and waited to learn where to leave.
        left: 1 once a loader or an optimizer has ended the rank's loop because of a stop.
        is_asynchronous: 1 if collectives of the rank's process groups only queue on its device.
        interrupted_call: number of the call that the agent interrupted last. A rank that begins
            this call only after the signal came sees here that the call is interrupted.
        seen_interrupt: value of ``interrupted_call`` when the rank last handled a SIGINT.
        disconnected_call: number of the call in which the agent asked the rank to shut down its
            connections to other ranks if stuck in a collective; 0 if it did not ask.
        tells_collectives: 1 if a thread of the rank answers which collectives it has begun.
    """

    batches: int
    total_batches: int
    pass_start: int
    steps: int
    reads: int
    device_memory: int
    device_peak: int
    device_limit: int
    call_over: int
    passed_batches: int
    passed_reads: int
    waits_batches: int
    waits_reads: int
    begun: int
    passed_begun: int
    waits_begun: int
    left: int
    is_asynchronous: int
    interrupted_call: int
    seen_interrupt: int
    disconnected_call: int
    tells_collectives: int
    step_times: ctypes.Array[ctypes.c_int64]

    # A structure of C, of the fields above: each step of a training writes here, and a Python
    # property would take three times as long.
    _fields_: ClassVar = [
        (name, _STEP_TIMES if name == "step_times" else ctypes.c_int64) for name in __annotations__
    ]

    @property
    def leaving(self) -> bool:
        """Whether a polite stop has reached this rank, so that it ends by itself.

        Either its loop was ended at a batch or a step, or its function has read ``should_stop``
        since the stop was asked, and decides itself when to return.
        """
        return bool(self.left or self.waits_reads)


class Scoreboard:
    """Shared memory with a row of counters for each rank of one agent, and the state of a stop.

    The agent makes it before it forks its ranks, which inherit the memory.
    """

    def __init__(self, num_ranks: int, *, has_others: bool = False) -> None:
        """Create a scoreboard of zeros.

        Args:
            num_ranks: number of ranks of this agent, one row each.
            has_others: whether other agents have ranks of the same run.
        """
        self.num_ranks = num_ranks
        self._has_others = has_others
        self._memory = mmap.mmap(-1, 8 * _HEADER + num_ranks * ctypes.sizeof(RankRow))
        self._view = memoryview(self._memory).cast("q")
        self.reset()

    def row(self, local_rank: int) -> RankRow:
        """Return the row of the rank with this local rank: a view of the shared memory."""
        return RankRow.from_buffer(self._memory, 8 * _HEADER + local_rank * ctypes.sizeof(RankRow))

    # ---- what the agent does ---------------------------------------------------------------

    def reset(self) -> None:
        """Zero all counters and withdraw any stop, for a new call.

        The agent calls it while no rank is in a call, so that no other process writes meanwhile.
        """
        for index in range(len(self._view)):
            self._view[index] = 0
        self._view[_OTHERS_ENDED] = not self._has_others

    def note_others_ended(self) -> None:
        """Record that the ranks of all other agents have ended their part of the call."""
        self._view[_OTHERS_ENDED] = 1

    def ask_stop(self, *, interrupts: bool = False) -> None:
        """Ask for a stop: each rank waits at its next point, until :meth:`leave_at` is called.

        Called by the agent. The point is a read of ``should_stop`` if the rank has read it, else a
        batch, or the beginning of an optimizer step if there are no batches.

        Args:
            interrupts: whether the ranks leave by KeyboardInterrupt.
        """
        self._view[_ASKED] = 2 if interrupts else 1

    def passed(self, *, patient: bool = True) -> StopPoint | None:
        """Return the furthest points that ranks of this agent have passed; None if not known yet.

        Called by the agent, after :meth:`ask_stop`; it does not wait. Ranks whose part of the call
        is over do not count.

        Args:
            patient: whether to return None while a rank has come to a point but has not shown yet
                whether it went on or waits. If False, that rank counts as having gone on: at worst
                all ranks leave one count later, which is correct too.
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
        return StopPoint(**highest, reads_should_stop=reads_should_stop)

    def leave_at(self, point: LeavePoint) -> None:
        """Tell the ranks where to leave; those that wait go on as far as ``point``.

        Called by the agent.
        """
        self._view[_LEAVE_READS] = point.reads
        self._view[_LEAVE_BEGUN] = _NEVER if point.batches is None else point.begun
        self._view[_LEAVE_BATCHES] = _NEVER if point.batches is None else point.batches

    # ---- what a rank does ------------------------------------------------------------------

    @property
    def all_ended(self) -> bool:
        """Whether every rank of the run, on all machines, has ended its part of the call."""
        rows = map(self.row, range(self.num_ranks))
        return bool(self._view[_OTHERS_ENDED]) and all(row.call_over for row in rows)

    @property
    def stop_asked(self) -> bool:
        """Whether the agent has asked for a stop, so that a rank must call :meth:`leaves`."""
        return bool(self._view[_ASKED])

    @property
    def interrupts(self) -> bool:
        """Whether the ranks leave by KeyboardInterrupt."""
        return self._view[_ASKED] > 1

    def leaves(self, local_rank: int, counter: str) -> bool:
        """Wait until it is known where the ranks leave; return whether this rank leaves now.

        A rank calls it after it has counted and then seen ``stop_asked``. If no stop is asked, the
        rank writes ``passed_batches``, ``passed_reads`` or ``passed_begun`` itself instead.

        Args:
            local_rank: of the calling rank.
            counter: what the rank has just counted: "batches", "reads" or "begun".
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
        if counter != "reads":
            row.left = 1
        return True
