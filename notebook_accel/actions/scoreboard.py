"""Counters in memory that the agent and its ranks share; how all ranks act at one point.

Each rank writes its own row, the agent of its machine reads all of them. So counting a step costs a
rank no system call, and the agent sees progress even while a rank holds the GIL.

The scoreboard also has all ranks of a run do the same *action* at the same *point* of their
training: stop, save, pause, or take a knob's new value. If one rank stopped earlier than another,
the other would wait for it in a collective for ever; if one took a new rate a step later, the two
would no longer train alike. A rank comes to a point whenever a prepared data loader gives a batch
(counted in "batches"), or the user's function reads ``should_stop`` ("reads") or ``should_save``
("saves"), and in a loop without a prepared loader whenever an optimizer step begins ("begun"; of an
optimizer that was not prepared, the first step after a collective: one rank may have its own).
:func:`leave_after` and :func:`meet_after` say which of them count. An interrupt of ranks whose
devices work asynchronously is a stop as well: their devices could not end what only some ranks have
queued.

    rank, at each point                       agent                          kernel
    row.batches = n    (it comes)
    is there an action that it has not done?
      no: row.passed_batches = n, go on
      yes: row.waits_batches = n, wait        ask(number, content)      <--  Act, Stop
                                              passed() -> Passed        -->  meet_after(all answers)
      n before the point: go on               act_at(point)             <--  ActAt
      else: row.did = number, act, row.done = number
                                              is_done(number)           -->  the next action

An action that meets no point is withdrawn, unless a rank has done it:

                                              hold(), passed()          -->  did no rank do it?
                                              act_at(NOWHERE), or       <--  ActAt
                                              act_at(point) once more

Invariants:

- A rank writes ``batches`` BEFORE it reads the number of the action that is asked.
  ``FLAG_SECONDS`` after the agent has set the number, each row shows one of three states: the rank
  has passed its newest point; it waits at that point; or it has not written yet which of the two.
  In the third state ``passed`` returns None and the agent asks again, for a second at most; then it
  takes the point for passed. So no rank passes a point unseen.
- From then on no rank passes a point until ``act_at`` is called. So the highest passed point stays
  correct, and no rank on any machine has passed the point after it.
- All ranks come to the same points in the same order, so that one point is enough for all.
- One action at a time: the next one is asked once all ranks have done it, or it was withdrawn. A
  stop is the last action of a call.
- Whenever the point becomes unknown (``ask``, ``hold``) a new *round* begins. A rank reads the
  round BEFORE it reads where to act, and the agent writes them in the other order: a rank that
  shows the newest round has seen in it that it must wait, and did not go on by an older point.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from typing import ClassVar

from notebook_accel.wire import Passed, Point, StepTimes

# How long to wait after the flag goes up until all rows are true: a processor may hold back the
# write of a rank that read the flag just before, for less than a microsecond.
FLAG_SECONDS = 0.001

# A rank that waits for the point looks so often: the others wait for it in their next collective.
_POLL_SECONDS = 0.0005
# A rank in a pause looks so often whether it is over.
_PAUSE_POLL_SECONDS = 0.02
_COUNTERS = ("batches", "reads", "begun", "saves")
# The head of the board: the number of the newest action and the length of its content; the counts
# at which ranks act (0: not known yet); the round; the number of the newest pause that is over;
# whether the ranks of other agents have ended their part of the call.
(
    _ASKED,
    _LENGTH,
    _AT_BATCHES,
    _AT_READS,
    _AT_BEGUN,
    _AT_SAVES,
    _ROUND,
    _GO_ON,
    _OTHERS_ENDED,
    _HEADER,
) = range(10)
_NEVER = 2**62
_STEP_TIMES = ctypes.c_int64 * len(StepTimes.__struct_fields__)
_NO_POINT = memoryview(bytes(8 * len(_COUNTERS))).cast("q")
# The number of a stop, which no other action comes after.
STOP = 2**31
# The content of a stop in which ranks leave by KeyboardInterrupt.
BY_INTERRUPT = b"interrupt"
# Bytes that the content of an action may have.
MAX_CONTENT = 2**16


def leave_after(answers: Iterable[Passed]) -> Point:
    """Return where all ranks stop: right after the furthest point that any rank has passed.

    Called in the kernel. If any rank has read ``should_stop``, all ranks leave at a read of it.
    Then no loop is ended at a batch, not even on a rank that has not read ``should_stop``.
    """
    answers = tuple(answers)
    point = replace(_right_after(answers), saves=0)
    reads = any(one.reads_should_stop for one in answers)
    return replace(point, batches=0, begun=0) if reads else point


def meet_after(answers: Iterable[Passed]) -> Point:
    """Return where all ranks do an action that does not end their loops; as :func:`leave_after`.

    That is a batch, or the first point of any kind in a call that has no batches. Rank 0 may be the
    only one that reads ``should_save``: its reads count where nothing else does.
    """
    answers = tuple(answers)
    point = _right_after(answers)
    if any(one.batches for one in answers):
        return Point(batches=point.batches)
    return replace(point, saves=0) if any(one.reads or one.begun for one in answers) else point


def _right_after(answers: Sequence[Passed]) -> Point:
    passed = {name: max((getattr(one, name) for one in answers), default=0) for name in _COUNTERS}
    return Point(**{name: count + 1 for name, count in passed.items()})


class RankRow(ctypes.Structure):
    """The counters of one rank in shared memory, all 0 when a call begins.

    The agent writes ``interrupted_call`` and ``disconnected_call``, and, if the rank's process has
    ended, ``call_over``. The rank writes all others.

    Attributes:
        batches, steps, reads, saves: numbers, in this call, of batches that the rank has got or is
            about to get, of its optimizer steps, and of its reads of ``should_stop`` and
            ``should_save``.
        total_batches: length of the current pass through the loader, in batches; 0 if unknown.
        device_memory, device_peak, device_limit: bytes in use on the rank's device, as torch counts
            them, the most so far, and how many torch could use; 0 if unknown.
        call_over: 1 once the rank's part of the call is over. The rank sets it when its function
            has ended, before it sends the result; the agent sets it when the process has ended.
        has_raised: 1 once the function has raised; the report of its error, which takes long on a
            busy machine, may still be to come.
        passed_batches, passed_reads, passed_begun, passed_saves: the count when the rank last went
            on with its loop at such a point.
        waits_batches, waits_reads, waits_begun, waits_saves: the count when the rank last saw that
            an action is asked, and waited to learn where.
        did, done: number of the last action that the rank has begun, and ended; a pause counts as
            ended once the rank waits.
        paused: 1 in a pause, also while the training leaves the device and comes back.
        leaving: 1 once a polite stop has reached the rank, so that it ends by itself: its loop was
            ended at a batch or a step, or its function has read ``should_stop`` since the stop was
            asked, and decides itself when to return.
        interrupted_call: number of the call that the agent interrupted last. A rank that begins
            this call only after the signal came sees here that the call is interrupted.
        disconnected_call: number of the call in which the agent asked the rank to shut down its
            connections to other ranks if stuck in a collective; 0 if it did not ask.
    """

    batches: int
    total_batches: int
    pass_start: int
    steps: int
    reads: int
    begun: int
    saves: int
    device_memory: int
    device_peak: int
    device_limit: int
    call_over: int
    has_raised: int
    passed_batches: int
    passed_reads: int
    passed_begun: int
    passed_saves: int
    waits_batches: int
    waits_reads: int
    waits_begun: int
    waits_saves: int
    round: int
    did: int
    done: int
    paused: int
    leaving: int
    is_asynchronous: int
    interrupted_call: int
    seen_interrupt: int
    disconnected_call: int
    step_times: ctypes.Array[ctypes.c_int64]

    # A structure of C, of the fields above: each step of a training writes here, and a Python
    # property would take three times as long.
    _fields_: ClassVar = [
        (name, _STEP_TIMES if name == "step_times" else ctypes.c_int64) for name in __annotations__
    ]


class Scoreboard:
    """Shared memory with a row of counters for each rank of one agent, and the asked action."""

    def __init__(self, num_ranks: int, *, has_others: bool = False) -> None:
        self.num_ranks = num_ranks
        self._has_others = has_others
        self._content = 8 * _HEADER + num_ranks * ctypes.sizeof(RankRow)
        self._memory = mmap.mmap(-1, self._content + MAX_CONTENT)
        self._view = memoryview(self._memory)[: self._content].cast("q")
        places = range(8 * _HEADER, self._content, ctypes.sizeof(RankRow))
        self._rows = [RankRow.from_buffer(self._memory, place) for place in places]
        self.reset()

    def row(self, local_rank: int) -> RankRow:
        return self._rows[local_rank]

    # ---- what the agent does ---------------------------------------------------------------

    def reset(self) -> None:
        """Zero all counters and withdraw any stop, for a new call.

        The agent calls it while no rank is in a call, so that no other process writes meanwhile.
        """
        self._memory[: self._content] = bytes(self._content)
        self._view[_OTHERS_ENDED] = not self._has_others

    def note_others_ended(self) -> None:
        """Record that the ranks of all other agents have ended their part of the call."""
        self._view[_OTHERS_ENDED] = 1

    def ask(self, number: int, content: bytes = b"") -> None:
        """Ask for an action: each rank waits at its next point, until :meth:`act_at` is called.

        Called by the agent, once the action before is done on all ranks, or was withdrawn.

        Args:
            content: what the ranks are to do, as bytes that they understand.
        """
        # The number last: a rank that reads it must not find what belongs to the action before.
        self.hold()
        self._memory[self._content : self._content + len(content)] = content
        self._view[_LENGTH] = len(content)
        self._view[_ASKED] = number

    def passed(self, *, patient: bool = True) -> Passed | None:
        """Return the furthest points that ranks of this agent have passed; None if not known yet.

        Called by the agent, after :meth:`ask` or :meth:`hold`; it does not wait. For a stop, ranks
        whose part of the call is over do not count: nobody waits for them. Other actions all ranks
        do, or none.

        Args:
            patient: whether to return None while a rank has come to a point but has not shown yet
                whether it went on or waits. If False, that rank counts as having gone on: at worst
                all ranks act one count later, which is correct too.
        """
        is_stop = self._view[_ASKED] == STOP
        rows = self._rows_in_call() if is_stop else self._rows
        highest = {}
        for counter in _COUNTERS:
            counts = []
            for row in rows:
                came, passed = getattr(row, counter), getattr(row, f"passed_{counter}")
                waits = getattr(row, f"waits_{counter}") == came
                is_shown = came == passed or (waits and row.round == self._view[_ROUND])
                if not is_shown and patient and not row.call_over:
                    return None
                counts.append(passed if is_shown else came)
            highest[counter] = max(counts, default=0)
        return Passed(**highest, reads_should_stop=any(row.reads for row in rows))

    def act_at(self, point: Point) -> None:
        """Tell the ranks where to act; those that wait go on as far as ``point``."""
        for index, count in enumerate(astuple(point), _AT_BATCHES):
            self._view[index] = count or _NEVER

    def hold(self) -> None:
        """Take back where to act: ranks wait at their next point again. Called by the agent."""
        self._view[_AT_BATCHES : _AT_SAVES + 1] = _NO_POINT
        self._view[_ROUND] += 1

    def has_begun(self, number: int) -> bool:
        """Return whether a rank has begun the action. Called by the agent, after :meth:`passed`."""
        return any(row.did >= number for row in self._rows)

    def misses(self, number: int) -> bool:
        """Return whether a rank in the call has not begun the action."""
        return any(row.did < number for row in self._rows_in_call())

    def num_done(self, number: int) -> int | None:
        """Return how many ranks have done the action; None while a rank in the call has not."""
        if any(row.done < number and not row.call_over for row in self._rows):
            return None
        return sum(row.done >= number for row in self._rows)

    def go_on(self, number: int) -> None:
        """End the pause of this number. Called by the agent."""
        self._view[_GO_ON] = number

    @property
    def num_paused(self) -> int:
        """How many ranks wait in a pause, those aside whose part of the call is over."""
        return sum(row.paused for row in self._rows_in_call())

    def _rows_in_call(self) -> list[RankRow]:
        return [row for row in self._rows if not row.call_over]

    # ---- what a rank does ------------------------------------------------------------------

    @property
    def all_ended(self) -> bool:
        """Whether every rank of the run, on all machines, has ended its part of the call."""
        return bool(self._view[_OTHERS_ENDED]) and all(row.call_over for row in self._rows)

    @property
    def asked(self) -> int:
        return self._view[_ASKED]

    @property
    def interrupts(self) -> bool:
        """Whether the newest action is a stop in which ranks leave by KeyboardInterrupt."""
        return self.content == BY_INTERRUPT

    @property
    def content(self) -> bytes:
        return self._memory[self._content : self._content + self._view[_LENGTH]]

    def due(self, local_rank: int, counter: str) -> tuple[int, bytes] | None:
        """Wait until it is known where the ranks act; return the action's number if it is here.

        Its content comes with it: an action that was withdrawn may be followed by another one.

        A rank calls it after it has counted a point and then seen an action in ``asked`` that it
        has not done. If there is none, the rank writes ``passed_batches`` (or the like) itself.
        """
        row, index = self.row(local_rank), _AT_BATCHES + _COUNTERS.index(counter)
        count: int = getattr(row, counter)
        if counter == "reads" and self._view[_ASKED] == STOP:
            row.leaving = 1
        setattr(row, f"waits_{counter}", count)
        # Not for ever: an agent that cannot learn the point interrupts its ranks, and a rank
        # whose agent has died is killed.
        while True:
            this_round, at = self._view[_ROUND], self._view[index]
            number, content = self._view[_ASKED], self.content
            if at and this_round == self._view[_ROUND]:
                break
            row.round = this_round
            time.sleep(_POLL_SECONDS)
        if count < at:
            setattr(row, f"passed_{counter}", count)
            return None
        if number != STOP:
            row.did = number
            setattr(row, f"passed_{counter}", count)
        elif counter != "reads":
            row.leaving = 1
        return number, content

    def wait_in_pause(self, local_rank: int, number: int) -> None:
        self.row(local_rank).done = number
        while self._view[_GO_ON] < number:
            time.sleep(_PAUSE_POLL_SECONDS)
