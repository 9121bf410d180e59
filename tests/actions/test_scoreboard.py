"""Ranks count in shared memory, and leave at the same count when a stop was asked for."""

from __future__ import annotations

import time

import pytest

from notebook_accel import wire
from notebook_accel.actions.scoreboard import FLAG_SECONDS, STOP, Scoreboard, leave_after

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
