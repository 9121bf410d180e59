"""From stacks, as text, to who waits for whom."""

from dataclasses import replace
from typing import Any

import pytest

from notebook_accel import wire
from notebook_accel.launch.control.hang import HangWatch, find_hang, read_stack
from notebook_accel.launch.control.stacks import frames_of_function
from tests.notebook.states import after, running

CELL = "/tmp/ipykernel_1/1.py"
LABELS = {CELL: "Cell In[4]"}
SITE = "/env/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"
OURS = "/src/notebook_accel/training"
OTHER_THREAD = f"""Thread 0x01 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 5356 in barrier
  File "/usr/lib/python3.11/threading.py", line 982 in run

"""
ALL_REDUCE = (
    (f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    (CELL, 7, "train"),
)
WAIT_FOR_EVERYONE = (
    (f"{TORCH}/distributed/distributed_c10d.py", 5356, "barrier"),
    (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    (f"{OURS}/topology.py", 90, "barrier"),
    (f"{OURS}/accelerator.py", 336, "wait_for_everyone"),
    (CELL, 9, "train"),
)
GATHER_OBJECT = (
    (f"{TORCH}/distributed/distributed_c10d.py", 4000, "all_gather"),
    (f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_gather_object"),
    (CELL, 12, "evaluate"),
    (CELL, 20, "train"),
)
BACKWARD = (
    (f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"),
    (f"{TORCH}/_tensor.py", 623, "backward"),
    (f"{OURS}/accelerator.py", 239, "backward"),
    (CELL, 8, "train"),
)
TRAINER = (
    (f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    (f"{SITE}/transformers/trainer.py", 3000, "train"),
    (CELL, 30, "train"),
)
SAVE = (
    (f"{OURS}/checkpoint/saves.py", 200, "_wait"),
    (f"{OURS}/checkpoint/saves.py", 80, "meet"),
    (f"{OURS}/checkpoint/__init__.py", 120, "save"),
    (f"{OURS}/accelerator.py", 140, "save_state"),
    (CELL, 11, "train"),
)
# All have met: to write a large model, and to wait for those who do, may take its time.
WRITTEN = (SAVE[0], (f"{OURS}/checkpoint/saves.py", 150, "finish"), *SAVE[2:])
SLEEP = ((CELL, 5, "train"),)


def dump(frames):
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    caller = '  File "/src/notebook_accel/launch/worker/main.py", line 90 in _run'
    return (
        "\n".join([f"{OTHER_THREAD}Thread 0x02 (most recent call first):", *lines, caller]) + "\n"
    )


def stack(rank, frames, *, cpu=0):
    return read_stack(rank, dump(frames), LABELS, cpu=cpu)


@pytest.mark.parametrize(
    ("frames", "cpu", "operation", "line"),
    [
        (ALL_REDUCE, 0, "all_reduce", "Cell In[4], line 7"),
        (ALL_REDUCE, 100, "all_reduce", "Cell In[4], line 7"),
        (WAIT_FOR_EVERYONE, 0, "barrier (wait_for_everyone)", "Cell In[4], line 9"),
        (GATHER_OBJECT, 0, "all_gather_object", "Cell In[4], line 12"),
        (BACKWARD, 0, "backward", "Cell In[4], line 8"),
        # A backward that computes waits for nobody.
        (BACKWARD, 100, "", "Cell In[4], line 8"),
        (TRAINER, 0, "all_reduce", "Cell In[4], line 30"),
        (SAVE, 0, "save_state", "Cell In[4], line 11"),
        (WRITTEN, 0, "", "Cell In[4], line 11"),
        (SLEEP, 0, "", "Cell In[4], line 5"),
        ((("/home/me/train.py", 3, "f"),), 0, "", "train.py, line 3"),
    ],
)
def test_where_a_rank_stands(frames, cpu, operation, line):
    found = stack(0, frames, cpu=cpu)
    assert (found.operation, found.own_line) == (operation, line)


def test_a_rank_without_an_answer_and_one_whose_stack_is_cut():
    found = read_stack(1, "the rank did not answer\n", LABELS, cpu=None)
    assert (found.operation, found.own_line, found.is_idle) == ("", "", True)
    deep = "Thread 0x02 (most recent call first):\n" + f'  File "{CELL}", line 5 in f\n' * 100
    assert len(frames_of_function(f"{deep}  ...\n")) == 100


def find(*stacks, ended=(), silent=10.0):
    return find_hang(stacks, ended=ended, silent=silent, since=1000.0)


def test_a_rank_that_skips_a_collective():
    hang = find(stack(0, ALL_REDUCE), stack(1, SLEEP))
    assert hang.is_certain
    assert hang.text == (
        "the run hangs: rank 0 waits in all_reduce at Cell In[4], line 7; "
        "rank 1 is at Cell In[4], line 5. "
        "Every rank must make the same collective calls in one order"
    )
    assert hang.operations == {0: "all_reduce"}
    assert hang.elsewhere == {1: "at Cell In[4], line 5"}
    assert [ranks for ranks, _ in hang.stacks] == [(0,), (1,)]
    assert "line 5 in train" in hang.stacks[1][1]


def test_a_save_of_some_ranks_says_to_take_the_if_out():
    hang = find(stack(0, SAVE), stack(1, WAIT_FOR_EVERYONE))
    assert hang.text.startswith(
        "the run hangs: rank 0 waits in save_state at Cell In[4], line 11 (call it on every rank: "
        "take the `if` out); rank 1 waits in barrier (wait_for_everyone) at Cell In[4], line 9"
    )
    assert find(stack(0, WRITTEN), stack(1, WRITTEN), silent=300.0) is None


def test_ranks_in_different_collectives():
    hang = find(*(stack(rank, ALL_REDUCE) for rank in (0, 1, 3)), stack(2, WAIT_FOR_EVERYONE))
    assert hang.is_certain
    assert "ranks 0-1 and 3 wait in all_reduce at Cell In[4], line 7; rank 2 waits" in hang.text
    assert hang.elsewhere == {2: "at Cell In[4], line 9"}
    assert [ranks for ranks, _ in hang.stacks] == [(0, 1, 3), (2,)]


def test_who_waits_for_a_rank_at_work_does_not_hang():
    hang = find(stack(0, ALL_REDUCE), stack(1, SLEEP, cpu=98))
    assert not hang.is_certain
    assert hang.text.startswith("ranks wait for others, which are at work: rank 0 waits in all_red")


def test_nobody_waits():
    assert find(stack(0, SLEEP), stack(1, SLEEP)) is None
    assert find(stack(0, BACKWARD, cpu=90), stack(1, SLEEP)) is None


def test_one_collective_of_all_may_take_its_time():
    both = (stack(0, ALL_REDUCE), stack(1, ALL_REDUCE))
    assert find(*both, silent=20.0) is None
    assert find(*both, silent=40.0).is_certain
    assert find(both[0], ended=(1,)).text.startswith(
        "the run hangs: rank 0 waits in all_reduce at Cell In[4], line 7; rank 1 has ended"
    )


# ---- when ranks are asked ------------------------------------------------------------------


class Watched:
    """A watch over two ranks, with a clock that the test moves."""

    def __init__(self):
        self.watch = HangWatch(LABELS)
        self.state = running(2)
        self.num_asked = 0
        self.frames: dict[int, Any] = {0: ALL_REDUCE, 1: SLEEP}
        self.now = 100.0

    def go_on(self, seconds, **sample):
        """Let time pass; ranks answer at once."""
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            if sample:
                self.state = after(
                    self.state, wire.Sample(rank=1, usage=wire.Usage(steps=round(self.now * 10)))
                )
            self.state = self.watch.look(self.state, now=self.now)
            if self.watch.asks(self.state, now=self.now):
                self.num_asked += 1
                for rank, frames in self.frames.items():
                    self.watch.take(wire.Stacks(rank=rank, text=dump(frames)))
                    self.watch.take(wire.Collectives(rank=rank))


@pytest.fixture
def watched():
    found = Watched()
    idle = (wire.Sample(rank=rank, usage=wire.Usage(cpu=0)) for rank in (0, 1))
    found.state = after(found.state, *idle)
    return found


def test_a_hang_is_told_within_fifteen_seconds_and_taken_back(watched):
    watched.go_on(7.0)
    assert (watched.num_asked, watched.state.hang) == (0, None)
    assert [rank.quiet_since is not None for rank in watched.state.ranks] == [True, True]
    watched.go_on(1.6)
    assert (watched.num_asked, watched.state.hang) == (1, None), "one dump proves nothing"
    watched.go_on(3.0)
    hang = watched.state.hang
    assert hang.is_certain
    before = watched.state
    watched.go_on(1.0)
    assert watched.state is before, "nothing new is no news"
    watched.go_on(0.4, steps=True)
    assert watched.state.hang is None
    assert watched.state.ranks[1].quiet_since is None


def test_a_run_that_moves_is_never_asked(watched):
    watched.go_on(60.0, steps=True)
    # Or that only replaces what it shows.
    for number in range(10):
        plot = {"text/html": f"step {number}"}
        shown = wire.Displayed(rank=1, data=plot, display_id="plot", replaces=number > 0)
        watched.state = after(watched.state, shown)
        watched.go_on(6.0)
    assert watched.num_asked == 0


def test_a_long_computation_is_asked_rarely_and_is_no_hang(watched):
    watched.frames = {0: SLEEP, 1: SLEEP}
    watched.go_on(120.0)
    assert watched.num_asked <= 6
    assert watched.state.hang is None


def test_ranks_that_pass_through_collectives_are_no_hang(watched):
    for frames in (ALL_REDUCE, GATHER_OBJECT, WAIT_FOR_EVERYONE, ALL_REDUCE):
        watched.frames[0] = frames
        number = watched.num_asked
        while watched.num_asked == number:
            watched.go_on(0.2)
        watched.go_on(0.2)
        assert watched.state.hang is None


def test_a_run_that_is_stopped_keeps_what_was_told(watched):
    watched.go_on(12.0)
    hang = watched.state.hang
    assert hang is not None
    watched.state = replace(watched.state, status="stopping")
    watched.go_on(20.0, steps=True)
    assert watched.state.hang is hang


def test_a_rank_that_never_answers_holds_nothing_up(watched):
    watched.frames = {0: ALL_REDUCE}
    watched.go_on(20.0)
    assert "rank 1 is silent" in watched.state.hang.text


def test_a_rank_that_is_suspended_is_told_at_once_and_taken_back(watched):
    """Also where the other one goes on."""
    first, second = watched.state.ranks
    watched.state = replace(watched.state, ranks=(replace(first, pid=71), second))
    watched.state = after(watched.state, wire.Sample(rank=0, usage=wire.Usage(is_suspended=True)))
    watched.go_on(4.0, steps=True)
    assert watched.state.hang is None, "a debugger that only looks lets it go on"
    watched.go_on(2.0, steps=True)
    assert watched.state.hang.text.startswith("rank 0 is suspended")
    before = watched.state.hang
    watched.go_on(2.0, steps=True)
    assert watched.state.hang is before
    watched.state = after(watched.state, wire.Sample(rank=0, usage=wire.Usage(steps=1)))
    watched.go_on(0.4, steps=True)
    assert watched.state.hang is None
