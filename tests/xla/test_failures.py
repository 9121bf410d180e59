"""Ranks that fail, die or are stopped: threads of one process, which dies for both of them."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from notebook_accel import RunStopped, WorkerError
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.run_list import runs
from notebook_accel.rank.this_rank import current
from tests.engines.contract import _interrupts_when
from tests.engines.processes import gone
from tests.launches import launch
from tests.waiting import eventually

pytestmark = [pytest.mark.usefixtures("two_ranks"), pytest.mark.timeout(200)]
XLA = LaunchConfig(engine="xla", grace=5.0)


def fails(function):
    with pytest.raises(WorkerError) as caught:
        launch(function, (), config=XLA)
    eventually(lambda: gone(set(caught.value.run.pids)), within=20, what="the processes ended")
    return caught.value


@pytest.mark.parametrize("waits", ["in Python", "for it"])
def test_a_rank_that_raises_while_another_waits(waits):
    def meet():
        from notebook_accel import Accelerator

        accelerator = Accelerator()
        accelerator.wait_for_everyone()
        if accelerator.is_last_process:
            raise ValueError("no such batch")
        while waits == "in Python":
            time.sleep(0.01)
        accelerator.wait_for_everyone()

    error = fails(meet)
    assert (error.rank, error.ranks) == (1, [1])
    assert "no such batch" in error.traceback
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize(
    ("end", "told", "words"),
    [
        (lambda: os._exit(3), (3, None), "ended with exit code 3"),
        (lambda: os.kill(os.getpid(), 9), (None, "SIGKILL"), "was killed by SIGKILL"),
    ],
)
def test_ranks_whose_process_ends(end, told, words):
    def ends_on_one():
        if current().rank == 1:
            end()
        time.sleep(600)

    error = fails(ends_on_one)
    assert (set(error.ranks), error.exitcode, error.signal) == ({0, 1}, *told)
    assert f"rank {error.rank} {words}" in str(error)


def begun(function):
    run = launch(function, (), config=XLA, block=False)
    eventually(lambda: run.logs().count("begins") == 2, within=150, what="both ranks began")
    return run


def train_for_ever():
    from notebook_accel import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    data = torch.utils.data.TensorDataset(torch.randn(4000, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    print("begins")
    while True:
        for (inputs,) in accelerator.progress(loader, "for ever"):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()


def test_stop_between_steps():
    run = begun(train_for_ever)
    eventually(lambda: has_moved(run), within=100, what="the bars of both ranks move")
    run.stop()
    with pytest.raises(RunStopped):
        run.wait(100)
    assert run.status == "stopped"
    (model,) = run.rescued.models
    assert model.weight.device.type == "cpu"
    assert gone(set(run.pids))


def has_moved(run):
    """Whether both ranks' bars are seen to go on, while the run does."""
    return {bar.rank for bar in run.progress if bar.name == "for ever" and bar.n > 3} == {0, 1}


def test_an_interrupt_between_steps():
    before = {run.id for run in runs()}

    def is_training():
        return any(run.id not in before and has_moved(run) for run in runs())

    with pytest.raises(KeyboardInterrupt) as caught, _interrupts_when(is_training):
        launch(train_for_ever, (), config=XLA)
    run = caught.value.run
    assert run.status == "stopped"
    assert len(run.rescued.models) == 1
    assert gone(set(run.pids))


KERNEL = """
import time
from tests.xla.test_failures import begun, train_for_ever
print(*begun(train_for_ever).pids, flush=True)
time.sleep(600)
"""


def test_a_killed_kernel_leaves_nobody():
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    pids = {*map(int, kernel.stdout.readline().split())}
    below = {process.pid for process in psutil.Process(kernel.pid).children(recursive=True)}
    kernel.kill()
    kernel.wait()
    assert pids
    eventually(lambda: gone(pids | below), within=20, what="all of its processes ended")


def test_interrupt_of_what_reads_nothing():
    def loop():
        print("begins")
        try:
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            return f"{current().rank} heard"

    run = begun(loop)
    run.stop()
    run.wait(100)
    assert run.results == ["0 heard", "1 heard"]
    assert not any(psutil.pid_exists(pid) for pid in run.pids)
