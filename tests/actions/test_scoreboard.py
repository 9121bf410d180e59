"""Ranks count in shared memory, and leave at the same count when a stop was asked for."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from notebook_accel import wire
from notebook_accel.actions.scoreboard import FLAG_SECONDS, STOP, Scoreboard, leave_after

fork = mp.get_context("fork")
SOON = 10.0
COUNTERS = ("batches", "reads")


class Loop:
    """What a rank does at each step of a loop: count, then ask whether to leave."""

    def __init__(self, board: Scoreboard, rank: int, counter: str) -> None:
        self.board, self.rank, self.counter = board, rank, counter
        self.row = board.row(rank)

    @property
    def count(self) -> int:
        return int(getattr(self.row, self.counter))

    def comes(self) -> None:
        setattr(self.row, self.counter, self.count + 1)

    def leaves(self) -> bool:
        self.comes()
        if self.board.asked != STOP:
            setattr(self.row, f"passed_{self.counter}", self.count)
            return False
        return self.board.due(self.rank, self.counter) == STOP


def loops(num_ranks: int, counter: str) -> tuple[Scoreboard, list[Loop]]:
    board = Scoreboard(num_ranks)
    return board, [Loop(board, rank, counter) for rank in range(num_ranks)]


def stop(*boards: Scoreboard) -> wire.Point:
    """What agents and kernel do for a stop."""
    for board in boards:
        board.ask(STOP)
    time.sleep(FLAG_SECONDS)
    points = [answer(board) for board in boards]
    point = leave_after(points)
    for board in boards:
        board.act_at(point)
    return point


def answer(board: Scoreboard) -> wire.Passed:
    deadline = time.monotonic() + SOON
    while (point := board.passed()) is None:
        assert time.monotonic() < deadline, "a rank never says whether it went on"
        time.sleep(0.0002)
    return point


def test_a_reset_makes_ready_for_the_next_call() -> None:
    board, (one, other) = loops(2, "batches")
    one.leaves()
    stop(board)
    assert not one.row.leaving
    assert one.leaves()
    board.reset()
    assert board.asked == 0
    assert [loop.count for loop in (one, other)] == [0, 0]
    assert not one.row.leaving
    assert [one.leaves() for _ in range(5)] == [False] * 5


# ---- the point at which all leave ----------------------------------------------------------


@pytest.mark.parametrize("counter", COUNTERS)
def test_all_leave_at_the_count_at_which_all_see_the_stop(counter: str) -> None:
    board, (one, other) = loops(2, counter)
    for _ in range(3):
        assert not one.leaves()
        assert not other.leaves()
    stop(board)
    assert one.leaves()
    assert other.leaves()
    assert (one.count, other.count) == (4, 4)


@pytest.mark.parametrize("counter", COUNTERS)
def test_a_rank_whose_peer_passed_its_count_goes_on_with_it(counter: str) -> None:
    board, (one, other) = loops(2, counter)
    assert not other.leaves()
    # The other is in step 1 already and waits in a collective: leaving now would hang it.
    stop(board)
    assert not one.leaves()
    assert one.leaves()
    assert other.leaves()
    assert (one.count, other.count) == (2, 2)


def test_a_rank_that_runs_behind_goes_on_to_the_others_count() -> None:
    board, (fast, slow) = loops(2, "batches")
    for _ in range(7):
        fast.leaves()
    stop(board)
    assert [slow.leaves() for _ in range(8)] == [False] * 7 + [True]
    assert fast.leaves()


def test_the_highest_point_of_all_agents_counts() -> None:
    here, (one,) = loops(1, "batches")
    there, (other,) = loops(1, "batches")
    for _ in range(3):
        other.leaves()
    assert stop(here, there) == wire.Point(batches=4, reads=1, begun=1)
    assert [one.leaves() for _ in range(4)] == [False] * 3 + [True]
    assert other.leaves()


def test_a_function_that_reads_on_any_machine_decides_for_itself() -> None:
    here, (reader,) = loops(1, "reads")
    there, (batches,) = loops(1, "batches")
    reader.leaves()
    assert stop(here, there) == wire.Point(batches=None, reads=2)
    # It has not come to its first read yet: its peer goes on after its batch.
    assert not batches.leaves()
    late = Loop(there, 0, "reads")
    assert [late.leaves(), late.leaves()] == [False, True]
    assert reader.leaves()


def test_nobody_leaves_and_nobody_passes_before_the_point_is_known() -> None:
    board, (one, other) = loops(2, "batches")
    other.leaves()
    board.ask(STOP)
    left: list[bool] = []
    waiting = threading.Thread(target=lambda: left.append(one.leaves()), daemon=True)
    waiting.start()
    time.sleep(FLAG_SECONDS)
    assert answer(board) == wire.Passed(batches=1)
    waiting.join(0.05)
    assert waiting.is_alive()
    board.act_at(wire.Point(batches=2, reads=1))
    waiting.join(SOON)
    assert left == [False]
    assert [one.leaves(), other.leaves()] == [True, True]


def test_a_rank_between_its_two_writes_is_about_to_say() -> None:
    board, (one, other) = loops(2, "reads")
    one.leaves()
    other.comes()
    board.ask(STOP)
    assert board.passed() is None
    # It looked before the flag went up, and goes on.
    other.row.passed_reads = 1
    assert board.passed() == wire.Passed(reads=1, reads_should_stop=True)
    other.comes()
    assert board.passed() is None
    # It looked after that, and waits.
    other.row.waits_reads, other.row.round = 2, 1
    assert board.passed() == wire.Passed(reads=1, reads_should_stop=True)


def test_a_rank_that_never_says_counts_as_if_it_had_gone_on() -> None:
    board, (one, other) = loops(2, "reads")
    other.comes()
    board.ask(STOP)
    assert board.passed() is None
    point = board.passed(patient=False)
    assert point == wire.Passed(reads=1, reads_should_stop=True)
    board.act_at(leave_after([point]))
    # It was only slow, and had not gone on after all.
    assert board.due(1, "reads") is None
    assert [one.leaves(), one.leaves(), other.leaves()] == [False, True, True]


def _in_lockstep(
    loop: Loop, barrier: Any, at: Any, index: int, skew: Callable[[int], float]
) -> None:
    try:
        while not loop.leaves():
            barrier.wait(SOON)
            # Data is slow now here, now there: a stop often comes between two ranks' questions.
            time.sleep(skew(loop.count))
        at[index] = loop.count
    except threading.BrokenBarrierError:
        at[index] = -1
        os._exit(1)


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize(
    "agents",
    [
        pytest.param((3,), marks=pytest.mark.long, id="one agent"),
        pytest.param((2, 2), id="two agents"),
    ],
)
def test_processes_in_lockstep_never_leave_each_other_alone(
    counter: str, agents: Sequence[int]
) -> None:
    for number in range(12):
        made = [loops(num_ranks, counter) for num_ranks in agents]
        boards = [board for board, _ in made]
        parts = list(itertools.chain.from_iterable(parts for _, parts in made))
        barrier, at = fork.Barrier(len(parts)), fork.Array("q", len(parts))
        ranks = [
            fork.Process(
                target=_in_lockstep,
                args=(part, barrier, at, index, lambda n, i=index: 0.002 * ((n + i) % 3)),
            )
            for index, part in enumerate(parts)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + SOON
        while min(part.count for part in parts) < 2 + number and time.monotonic() < deadline:
            time.sleep(0.0003)
        stop(*boards)
        for process in ranks:
            process.join(SOON)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
        assert codes == [0] * len(ranks), f"round {number}: {list(at)}"
        assert len(set(at)) == 1, f"round {number}: {list(at)}"
