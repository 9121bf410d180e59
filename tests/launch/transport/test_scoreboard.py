"""Ranks count in shared memory, and leave at the same count when a stop was asked for."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from notebook_accel.launch.transport.scoreboard import Scoreboard

if TYPE_CHECKING:
    from collections.abc import Callable

fork = mp.get_context("fork")
SOON = 10.0
COUNTERS = ("batches", "reads")


class Loop:
    """What a rank does at each step of a loop: count, then ask whether to leave."""

    def __init__(self, board: Scoreboard, rank: int, counter: str, timeout: float = 1.0) -> None:
        self.board, self.rank, self.counter, self.timeout = board, rank, counter, timeout
        self.row = board.row(rank)

    @property
    def count(self) -> int:
        return self.row.get(self.counter)

    def leaves(self) -> bool:
        self.row.set(self.counter, self.count + 1)
        if not self.board.stop_asked:
            self.row.set(f"passed_{self.counter}", self.count)
            return False
        return self.board.leaves(self.rank, self.counter, timeout=self.timeout)


def loops(num_ranks: int, counter: str, timeout: float = 1.0) -> tuple[Scoreboard, list[Loop]]:
    board = Scoreboard(num_ranks)
    return board, [Loop(board, rank, counter, timeout) for rank in range(num_ranks)]


def test_rows_are_apart() -> None:
    board = Scoreboard(3)
    for rank in range(3):
        row = board.row(rank)
        row.batches, row.steps, row.total_batches = rank + 1, rank + 10, rank + 100
        row.device_memory, row.pass_start, row.ended = 2**40 + rank, rank + 5, rank % 2
    told = [
        (row.batches, row.steps, row.total_batches, row.device_memory, row.pass_start, row.ended)
        for row in map(board.row, range(3))
    ]
    assert told == [(r + 1, r + 10, r + 100, 2**40 + r, r + 5, r % 2) for r in range(3)]
    assert not board.stop_asked


def test_a_forked_process_shares_the_board() -> None:
    board = Scoreboard(2)

    def child() -> None:
        board.row(1).steps = 7
        while not board.stop_asked:
            time.sleep(0.001)

    process = fork.Process(target=child)
    process.start()
    board.ask_stop()
    process.join(SOON)
    assert (process.exitcode, board.row(1).steps) == (0, 7)


@pytest.mark.parametrize("counter", COUNTERS)
def test_nobody_leaves_before_a_stop_is_asked(counter: str) -> None:
    _, (one, other) = loops(2, counter)
    assert [one.leaves() for _ in range(5)] + [other.leaves()] == [False] * 6


@pytest.mark.parametrize("counter", COUNTERS)
def test_all_leave_at_the_count_at_which_all_see_the_stop(counter: str) -> None:
    board, (one, other) = loops(2, counter)
    for _ in range(3):
        assert not one.leaves()
        assert not other.leaves()
    board.ask_stop()
    assert one.leaves()
    assert other.leaves()
    assert (one.count, other.count) == (4, 4)


@pytest.mark.parametrize("counter", COUNTERS)
def test_a_rank_whose_peer_passed_its_count_goes_on_with_it(counter: str) -> None:
    board, (one, other) = loops(2, counter)
    assert not other.leaves()
    board.ask_stop()
    # The other is in step 1 already and waits in a collective: leaving now would hang it.
    begin = time.monotonic()
    assert not one.leaves()
    assert time.monotonic() - begin < 0.9, "it waited for a rank that waits for it"
    assert one.leaves()
    assert other.leaves()
    assert (one.count, other.count) == (2, 2)


def test_a_rank_that_runs_behind_goes_on_to_the_others_count() -> None:
    board, (fast, slow) = loops(2, "batches")
    for _ in range(7):
        fast.leaves()
    board.ask_stop()
    assert [slow.leaves() for _ in range(8)] == [False] * 7 + [True]
    assert fast.leaves()


def test_a_rank_in_between_is_waited_for() -> None:
    board, (one, other) = loops(2, "reads", timeout=SOON)
    # The other has counted, and has not asked yet.
    other.row.set("reads", 1)
    board.ask_stop()
    asking = threading.Timer(0.05, lambda: board.leaves(1, "reads", timeout=SOON))
    asking.start()
    begin = time.monotonic()
    assert one.leaves()
    assert time.monotonic() - begin < 5
    asking.join()


def test_a_rank_that_died_in_between_is_waited_for_no_longer_than_the_time_out() -> None:
    board, (one, other) = loops(2, "reads", timeout=0.05)
    other.row.set("reads", 1)
    board.ask_stop()
    assert one.leaves()


def test_a_rank_that_ended_is_not_waited_for() -> None:
    board, (one, other) = loops(2, "batches", timeout=SOON)
    for _ in range(50):
        other.leaves()
    other.row.ended = 1
    board.ask_stop()
    begin = time.monotonic()
    assert one.leaves()
    assert time.monotonic() - begin < 5


def test_a_rank_that_never_reads_is_not_waited_for() -> None:
    board, (one, _) = loops(2, "reads", timeout=SOON)
    one.leaves()
    board.ask_stop()
    begin = time.monotonic()
    assert one.leaves()
    assert time.monotonic() - begin < 5


def test_whoever_left_leaves_again() -> None:
    board, (one, other) = loops(2, "reads")
    board.ask_stop()
    assert one.leaves()
    assert other.leaves()
    assert one.leaves()
    assert other.leaves()


def test_who_is_leaving() -> None:
    board, (fast, slow) = loops(2, "batches")
    for _ in range(3):
        fast.leaves()
    board.ask_stop()
    slow.leaves()
    # It knows of the stop, and has still to go on to the others' count.
    assert not slow.row.leaving
    assert fast.leaves()
    assert fast.row.leaving
    # A function that reads decides for itself.
    board, (reader, _) = loops(2, "reads")
    board.ask_stop()
    reader.leaves()
    assert reader.row.leaving


def _in_lockstep(loop: Loop, barrier: Any, at: Any, skew: Callable[[int], float]) -> None:
    try:
        while not loop.leaves():
            barrier.wait(SOON)
            # Data is slow now here, now there: a stop often comes between two ranks' questions.
            time.sleep(skew(loop.count))
        at[loop.rank] = loop.count
    except threading.BrokenBarrierError:
        at[loop.rank] = -1
        os._exit(1)


@pytest.mark.parametrize("counter", COUNTERS)
def test_processes_in_lockstep_never_leave_each_other_alone(counter: str) -> None:
    num_ranks, rounds = 3, 12
    for number in range(rounds):
        board, parts = loops(num_ranks, counter)
        barrier, at = fork.Barrier(num_ranks), fork.Array("q", num_ranks)
        ranks = [
            fork.Process(
                target=_in_lockstep,
                args=(part, barrier, at, lambda n, r=part.rank: 0.002 * ((n + r) % num_ranks)),
            )
            for part in parts
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + SOON
        while min(part.count for part in parts) < 2 + number and time.monotonic() < deadline:
            time.sleep(0.0003)
        board.ask_stop()
        for process in ranks:
            process.join(SOON)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
        assert codes == [0] * num_ranks, f"round {number}: {list(at)}"
        assert len(set(at)) == 1, f"round {number}: {list(at)}"
