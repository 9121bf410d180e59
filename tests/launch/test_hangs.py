"""Runs that hang on purpose, and one that only seems to: real ranks, real stacks."""

import io
import os
import pathlib
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin
from notebook_accel.launch.run import call_of
from notebook_accel.launch.view.plain import PlainView
from tests.launches import on_cpu
from tests.waiting import eventually

pytestmark = pytest.mark.serial

_SECONDS = 15.0


@pytest.fixture
def launch():
    """Launch what hangs on two ranks; at the end it is killed."""
    runs = []

    def begin(function, *args, **asked):
        runs.append(on_cpu(function, *args, grace=2.0, block=False, **asked))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
        eventually(lambda run=run: run.state.has_ended, what="it has ended")


def _meet():
    """Both ranks are in a group, and have begun; gives the rank."""
    accelerator = Accelerator()
    dist.all_reduce(torch.ones(1))
    print("begun", flush=True)
    return accelerator.process_index


def skips(folder):
    if _meet() == 0:
        dist.all_reduce(torch.ones(1))
    while not pathlib.Path(folder, "end").exists():
        time.sleep(0.1)


def crosses(folder):
    if _meet() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.broadcast(torch.ones(1), src=1)
        dist.barrier()


def receives_unrecorded(folder):
    """Both ranks wait for the other one to send, in a torch without a flight recorder."""

    native = torch._C._distributed_c10d
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if hasattr(native, name):
            delattr(native, name)
    if _meet() == 0:
        dist.recv(torch.ones(1), src=1)
    else:
        dist.recv(torch.ones(1), src=0)


def saves(folder):
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    accelerator.prepare(torch.nn.Linear(2, 2))  # of which each rank has a part
    if _meet() == 0:
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()


def computes(folder):
    if _meet() == 1:
        while not pathlib.Path(folder, "end").exists():
            sum(number * number for number in range(1_000_000))
    dist.all_reduce(torch.ones(1))


def test_a_hang_is_told_as_such_and_a_long_computation_is_not(launch, tmp_path):
    texts = [io.StringIO() for _ in range(4)]
    functions = (skips, crosses, computes, receives_unrecorded)
    runs = [
        launch(function, str(tmp_path), view=PlainView(stream=text))
        for function, text in zip(functions, texts, strict=True)
    ]
    skipped, crossed, computed, received = runs
    told_of = []
    for run in runs:
        run.add_done_callback(lambda run: told_of.append((run, run.status)))
        eventually(lambda run=run: run.logs().count("begun") == 2, what="all have begun")
    began = time.monotonic()
    while not (skipped.state.hang and crossed.state.hang and received.state.hang):
        assert time.monotonic() < began + _SECONDS, "the hangs are told in time"
        for run in runs:
            call_of(run).view.poll()
        time.sleep(0.05)
    for run in runs:
        call_of(run).view.poll()
    hang = skipped.state.hang
    assert hang.is_certain
    assert "rank 0 waits in all_reduce at test_hangs.py, line" in hang.text
    assert set(hang.elsewhere) == {1}
    assert "Collective 2 is all_reduce of [1] on rank 0; rank 1 has come to 1. Ev" in hang.text
    for ranks, stack in hang.stacks:
        assert "test_hangs.py" in stack, ranks
    # The same in plain text, with each rank's stack.
    told = texts[0].getvalue()
    waits = "the run hangs: rank 0 waits in all_reduce"
    for words in ("Nothing has moved for 0:", waits, "stack of rank 0:\n", "stack of rank 1:\n"):
        assert words in told
    assert crossed.state.hang.is_certain
    assert set(crossed.state.hang.operations) == {0, 1}
    where = r"at test_hangs.py, line \d+"
    told_so = rf"is all_reduce of \[1\] on rank 0, {where}; broadcast of \[1\] on rank 1, "
    assert re.search(f"Collective 2 {told_so}", crossed.state.hang.text)

    # Without a recorder, and for what gloo's does not have, stacks alone tell where ranks wait.
    assert re.search(
        rf"hangs: rank 0 waits in recv {where}; rank 1 waits in recv {where}\. Every rank must",
        received.state.hang.text,
    )
    assert texts[3].getvalue().count("this torch has no flight recorder") == 1

    # Who computes holds others up; that is said, and is no hang.
    eventually(lambda: computed.state.hang, within=_SECONDS, what="the third waits")
    waits = computed.state.hang
    assert not waits.is_certain
    eventually(lambda: len(told_of) == 3, what="the hangs are told")
    assert {*told_of} == {(run, "running") for run in (skipped, crossed, received)}
    (tmp_path / "end").touch()
    computed.wait(timeout=30)
    assert computed.status == "succeeded"
    eventually(lambda: len(told_of) == 4, what="callbacks are told")
    assert told_of[3] == (computed, "succeeded")


def waits_beside_a_busy_thread():
    def work():
        print("works", flush=True)
        while True:
            sorted(str(number) for number in range(100))

    threading.Thread(target=work, daemon=True).start()
    time.sleep(600)


def test_stacks_of_a_busy_rank_are_read_and_do_no_harm(launch):
    run = launch(waits_beside_a_busy_thread)
    eventually(lambda: run.logs().count("works") == 2, what="both have begun")
    stacks = run.stacks()
    assert stacks.count("in waits_beside_a_busy_thread") == 2
    assert stacks.count("in work") == 2


def waits_alone():
    print("begun", flush=True)
    time.sleep(600)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_that_are_suspended_are_named(num_ranks, launch):
    text = io.StringIO()
    run = launch(waits_alone, n=num_ranks, view=PlainView(stream=text))
    eventually(lambda: run.logs().count("begun") == num_ranks, what="all begin")
    for pid in run.pids:
        os.kill(pid, signal.SIGSTOP)
    ranks = "rank 0 is" if num_ranks == 1 else "ranks 0-1 are"

    def is_told():
        call_of(run).view.poll()
        return f"notebook_accel: {ranks} suspended, by SIGSTOP or a deb" in text.getvalue()

    eventually(is_told, within=_SECONDS, what="it is told")
    assert f"`kill -CONT {' '.join(map(str, run.pids))}`" in text.getvalue()
    for pid in run.pids:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: run.state.hang is None, within=_SECONDS, what="they go on")


def test_a_save_of_rank_0_alone_is_told_with_its_remedy(launch, tmp_path):
    run = launch(saves, str(tmp_path), view=PlainView())
    eventually(lambda: run.state.hang, what="the hang is told")
    assert "rank 0 waits in save_state at test_hangs.py, line" in run.state.hang.text
    assert "(call it on every rank: take the `if` out); rank 1 wait" in run.state.hang.text
