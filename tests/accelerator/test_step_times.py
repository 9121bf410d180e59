"""Where the time of steps goes on devices that compute while the host goes on, and their memory."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, DataLoaderConfiguration, notebook_launcher
from notebook_accel.errors import WorkerError
from notebook_accel.launch.view.step_times import step_lines, step_table

STEPS = 60


class Samples:
    """Samples that take a while to read."""

    def __init__(self, wait):
        self.wait = wait

    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, index):
        time.sleep(self.wait)
        return torch.ones(64)


def train(kind):
    accelerator = Accelerator()
    is_slow = accelerator.process_index == 1
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Samples(0.06 * (is_slow and kind == "data")), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    much = torch.ones(800, 800, device=accelerator.device)
    for batch in loader:
        loss = model(batch).square().mean()
        for _ in range(5 * (is_slow and kind == "device")):
            # The device computes behind the host.
            loss = loss + 0 * (much @ much).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_the_others_wait_on_their_device_for_a_rank_that_waits_for_data():
    run = notebook_launcher(train, ("data",), num_processes=2, view="none")
    (line,) = step_lines(run.state)
    assert line.startswith("rank 1 waits ")
    assert line.endswith("% of each step for data")
    fast, slow = (rank.step_times for rank in run.state.ranks)
    assert fast.collectives > fast.total / 2
    assert slow.collectives < slow.total / 3
    assert slow.data_wait > slow.total / 2 > fast.data_wait


def test_a_slow_device_is_named():
    run = notebook_launcher(train, ("device",), num_processes=2, view="none")
    (line,) = step_lines(run.state)
    assert line.startswith("rank 0 waits ")
    assert line.endswith("% of each step for rank 1")


def stepping(reads):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Samples(reads), batch_size=1, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    much = torch.ones(1000, 1000, device=accelerator.device)
    longest = 0.0
    for batch in loader:
        begun = time.perf_counter()
        loss = model(batch).square().mean() + 0 * (much @ much @ much @ much).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        longest = max(longest, time.perf_counter() - begun)
    begun = time.perf_counter()
    torch.accelerator.synchronize()
    return {"longest": longest, "behind": time.perf_counter() - begun}


def test_measuring_never_waits_for_the_device():
    # The host is done long before the device is, events or not.
    (found,) = notebook_launcher(stepping, (0.0,), num_processes=1, view="none")
    assert found["behind"] > 5 * found["longest"], found


def test_data_that_is_read_while_the_device_computes_is_not_waited_for():
    run = notebook_launcher(stepping, (0.002,), num_processes=1, view="none")
    (rank,) = run.state.ranks
    times = rank.step_times
    assert times.data_wait < times.data / 3 < times.total, times
    assert step_lines(run.state) == []


def fill(megabytes):
    accelerator = Accelerator()
    model = nn.Linear(4000, 4000, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    kept = [torch.ones(250_000, device=accelerator.device) for _ in range(megabytes)]
    for _ in range(10):
        accelerator.backward(model(torch.ones(1, 4000, device=accelerator.device)).sum())
        optimizer.step()
        time.sleep(0.2)  # the memory is asked once a second
    del kept


def test_memory_at_its_peak_and_a_hint_before_it_is_full():
    # Of a GB: 4 times 64 MB of the model, and what is kept.
    run = notebook_launcher(fill, (100,), num_processes=1, view="none")
    (rank,) = run.state.ranks
    assert rank.device_memory is not None
    assert rank.device_peak is not None
    assert rank.device_memory <= rank.device_peak
    assert rank.device_limit == pytest.approx(1 << 30, rel=0.01)
    head, row = step_table(run.state)
    assert head[-1] == "peak memory"
    assert row[-1].endswith(" of 1.1 GB")
    assert step_lines(run.state) == []
    run = notebook_launcher(fill, (730,), num_processes=1, view="none")
    assert step_lines(run.state)[-1].startswith("device memory of rank 0 is nearly full, ")


def test_an_error_says_what_fills_the_memory():
    with pytest.raises(WorkerError) as raised:
        notebook_launcher(fill, (5000,), num_processes=1, view="none")
    text = str(raised.value)
    assert "What took the memory of rank 0: the rest, such as activations " in text
    assert ", weights 64 MB" in text
