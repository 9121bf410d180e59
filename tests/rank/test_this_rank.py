"""Who a rank is, wherever its code asks, and what it says to whom."""

import contextlib
import contextvars
import os
import threading

import numpy as np
import pytest
import torch

from notebook_accel import ConfigError, wire
from notebook_accel.actions.scoreboard import Scoreboard
from notebook_accel.launch.transport.channel import decode, encode
from notebook_accel.rank import this_rank
from notebook_accel.rank.this_rank import DeviceMemory, LaunchedContext, RankContext, current, enter


@pytest.fixture(autouse=True)
def _nobody_yet(monkeypatch):
    """A process in which nobody has asked who it is."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(this_rank, "_process_context", None)
    token = this_rank._context.set(None)
    yield
    this_rank._context.reset(token)


def launched(number=1, board=None):
    told = []
    board = board or Scoreboard(2)
    context = LaunchedContext(
        rank=number,
        local_rank=number,
        world_size=2,
        local_world_size=2,
        run="r",
        send=told.append,
        board=board,
    )
    return context, told, board


# ---- who -----------------------------------------------------------------------------------


def test_a_rank_of_a_launcher_that_says_less(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    context = RankContext.from_environment()
    assert (context.local_rank, context.local_world_size) == (3, 4)


def in_thread(context=None):
    """Who a thread of the user's is."""
    found = []

    def ask():
        found.append(current())

    thread = threading.Thread(target=(lambda: context.run(ask)) if context else ask)
    thread.start()
    thread.join()
    return found[0]


def test_threads_of_a_rank_are_that_rank():
    context, _, _ = launched()
    enter(context)
    assert current() is context
    assert in_thread() is context
    assert in_thread(contextvars.Context()) is context


def test_ranks_that_are_threads():
    found = {}

    def be(number):
        context, _, _ = launched(number)
        enter(context, whole_process=False)
        inherited = contextvars.copy_context()
        assert in_thread(inherited) is context
        found[number] = current()

    threads = [threading.Thread(target=be, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: context.rank for number, context in found.items()} == {0: 0, 1: 1}
    assert not current().launched


def test_first_questions_from_many_threads_get_one_answer():
    barrier = threading.Barrier(8)
    found = []

    def ask():
        barrier.wait()
        found.append(current())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(context) for context in found}) == 1


def _in_child(act):
    pid = os.fork()
    if not pid:
        try:
            os._exit(int(act()))
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_knows_its_rank_and_says_nothing():
    context, told, _ = launched()
    enter(context)

    def child():
        assert current().rank == 1
        current().notice("from a loader's worker")
        current().metric({"loss": 1.0})
        current().report(wire.Bar, bar=1, name="b", n=1)
        return len(told)

    assert _in_child(child) == 0
    current().notice("from the rank")
    assert len(told) == 1


# ---- what it says --------------------------------------------------------------------------


def test_values_and_steps_of_any_kind_of_number_are_told_as_a_message_can_carry_them():
    context, told, _ = launched()
    numbers = (np.float32(0.5), np.int64(3), torch.tensor(2.0), True)
    context.metric(dict(zip("abcd", numbers, strict=True)))
    assert repr(told[0].values) == "{'a': 0.5, 'b': 3.0, 'c': 2.0, 'd': 1.0}"
    for step in (np.int64(3), 3.0, 2**63 - 1):
        context.metric({}, step)
    assert [message.step for message in map(decode, map(encode, told))] == [None, 3, 3, 2**63 - 1]
    for step in (2**70, float("inf"), "three"):
        with pytest.raises(ConfigError, match="step="):
            context.metric({}, step)


# ---- counting ------------------------------------------------------------------------------


def test_batches_of_several_passes():
    context, _, board = launched()
    row = board.row(1)
    seen = []
    # The third pass is left after two of its five batches, the last one resumed after three. A
    # loader's length may be an integer of NumPy's.
    five = np.int64(5)
    passes = ((3, (1, 2, 3)), (3, (1, 2, 3)), (5, (1, 2)), (None, (1, 2)), (5, (1,)), (5, (4, 5)))
    for total, numbers in passes:
        for number in numbers:
            context.count_batch(five if total == 5 else total, number)
            seen.append((row.batches, row.pass_start, row.total_batches))
    assert seen == [
        *((n, 0, 3) for n in (1, 2, 3)),
        *((n, 3, 3) for n in (4, 5, 6)),
        *((n, 6, 5) for n in (7, 8)),
        *((n, 8, 0) for n in (9, 10)),
        (11, 10, 5),
        *((n, 8, 5) for n in (12, 13)),
    ]
    assert board.row(0).batches == 0


def test_steps_and_the_memory_now_and_then():
    context, _, board = launched()
    asked = []

    def memory():
        asked.append(1)
        return DeviceMemory(2**33, 2**34, 2**35)

    for _ in range(1000):
        context.count_step(memory)
    assert board.row(1).steps == 1000
    row = board.row(1)
    assert (row.device_memory, row.device_peak, row.device_limit) == (2**33, 2**34, 2**35)
    assert 1 <= len(asked) < 100
    context.count_step(lambda: None)
    context.count_step()
    assert board.row(1).steps == 1002


class _Training:
    optimizers = ("one",)


def test_steps_are_those_of_optimizers_and_without_any_batches():
    """In a first window of several batches, steps would else go down again at its end."""
    context, _, _ = launched()
    context.count_batch()
    context.count_batch()
    assert context.num_steps == 2
    training = _Training()
    context.note_training(training, "")
    assert context.num_steps == 0


@pytest.mark.parametrize(("num_before", "begun"), [(0, [1, 2, 3]), (4, [2**32 + 1] * 3)])
def test_a_step_of_ones_own_is_no_point_also_right_after_the_first_collectives(num_before, begun):
    """DDP has begun some by its first backward; without any, each step is a point."""
    context, _, board = launched()
    enter(context)
    found = []
    for optimizer in (torch.optim.SGD([torch.ones(1)]) for _ in range(3)):
        context.begin_plain_step(optimizer, lambda: num_before, contextlib.nullcontext)
        context.end_plain_step(optimizer, lambda _: None)
        found.append(board.row(1).begun)
    assert found == begun


def test_steps_of_optimizers_that_nobody_has_prepared_also_after_one_that_failed():
    context, _, board = launched()
    enter(context)

    def begin(optimizer):
        context.begin_plain_step(optimizer, lambda: 0, contextlib.nullcontext)

    def end(optimizer):
        context.end_plain_step(optimizer, lambda _: None)

    failed, outer, inner = (torch.optim.SGD([torch.ones(1)]) for _ in range(3))
    begin(failed)  # which had no room for its state; another one goes on
    for _ in range(5):
        begin(outer)
        begin(inner)
        end(inner)
        end(outer)
    # The first is taken for one within the failed one's step.
    assert board.row(1).begun == board.row(1).steps + 1 == 5
