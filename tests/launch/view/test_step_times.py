"""The table of steps, and the sentences on what slows them down."""

from dataclasses import replace

import pytest

from notebook_accel import wire
from notebook_accel.launch.control.run_state import starting
from notebook_accel.launch.view.step_times import step_lines, step_table

# Milliseconds of a step of 100 ms.
PLAIN = {"data": 5, "forward": 30, "backward": 50, "optimizer": 10, "rest": 5, "collectives": 0}


def times(**parts):
    own = {**PLAIN, "data_wait": parts.get("data", 5), **parts}
    sums = {name: 10 * value * 1_000_000 for name, value in own.items()}
    return wire.StepTimes(num_steps=10, total=10 * 100 * 1_000_000, **sums)


def state(*ranks, **fields):
    begun = starting(run="id", name="train", world_size=len(ranks), started=0.0)
    own = [
        replace(rank, step_times=given, **fields)
        for rank, given in zip(begun.ranks, ranks, strict=True)
    ]
    return replace(begun, ranks=tuple(own))


def test_nothing_is_shown_before_steps_are_known():
    assert step_table(state(wire.StepTimes(), wire.StepTimes(num_steps=4, total=1))) == []
    assert step_lines(state(wire.StepTimes())) == []


def test_each_of_few_ranks_has_a_row():
    assert step_table(state(times(), times(data=25, backward=30))) == [
        ("rank", "a step", "data", "forward", "backward", "collectives", "optimizer", "rest"),
        ("0", "100.0 ms", "5%", "30%", "50%", "0%", "10%", "5%"),
        ("1", "100.0 ms", "25%", "30%", "30%", "0%", "10%", "5%"),
    ]


def test_of_many_ranks_the_slowest_and_the_median_have_one():
    fast, slow = times(backward=10, collectives=40), times(data=45, backward=10)
    run = state(*[fast] * 100, slow, *[fast] * 27)
    assert [row[:3] for row in step_table(run)[1:]] == [
        ("100, the slowest", "100.0 ms", "45%"),
        ("median", "100.0 ms", "5%"),
    ]
    assert step_lines(run) == ["rank 100 waits 45% of each step for data"]


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ([times(), times()], ""),
        ([times(data=45)], "the training waits 45% of each step for data (try more num_workers)"),
        # A device that still computes meanwhile does not wait.
        ([times(data=45, data_wait=2)], ""),
        (
            [times(data=45), times(data=44)],
            "all ranks wait 44% of each step for data (try more num_workers)",
        ),
        (
            [times(forward=30, collectives=30), times(forward=60)],
            "rank 0 waits 30% of each step for rank 1's forward",
        ),
        (
            [*[times(forward=30, collectives=30)] * 2, times(forward=60)],
            "the others wait 30% of each step for rank 2's forward",
        ),
        # Its device: nothing on its host takes longer.
        ([times(), times(collectives=30)], "rank 1 waits 30% of each step for rank 0"),
        # Where nobody waits for it, longer parts are collectives that nobody measured.
        ([times(), times(forward=60)], ""),
    ],
)
def test_what_is_said_of_the_speed(ranks, line):
    assert step_lines(state(*ranks)) == ([line] if line else [])


def test_memory_that_is_nearly_full_is_told_before_it_is():
    run = state(times(), times(), device_peak=int(22e9), device_limit=int(24e9))
    assert [row[-1] for row in step_table(run)] == ["peak memory", *["22.0 GB of 24.0 GB"] * 2]
    line = "device memory of ranks 0-1 is nearly full, 22.0 GB of 24.0 GB at the peak"
    assert step_lines(run) == [line]
    half = state(times(), device_peak=int(12e9), device_limit=int(24e9))
    assert step_lines(half) == []
