"""Where the time of launched ranks' steps goes, as measured while they train on CPUs."""

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from notebook_accel import Accelerator, RunStopped, notebook_launcher
from notebook_accel.launch.text import wording
from notebook_accel.launch.view.step_times import step_lines, step_table
from notebook_accel.launch.view.summary import summary_lines
from tests.waiting import eventually

WAIT = 0.02


class Slowness:
    """Waits of one rank, each four times as long as all between two: as much on a busy machine."""

    def __init__(self, is_slow):
        self.is_slow = is_slow
        self.waited = time.monotonic()

    def wait(self, *_):
        if self.is_slow:
            time.sleep(max(WAIT, 4 * (time.monotonic() - self.waited)))
            self.waited = time.monotonic()


class Samples(Dataset[Any]):
    """Samples that take a while to read, on one rank."""

    def __init__(self, number, wait):
        self.number = number
        self.wait = wait

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        self.wait()
        return torch.ones(8)


def train(slow, slow_rank=1, epochs=1, samples=80):
    accelerator = Accelerator(gradient_accumulation_steps=2 if slow == "accumulating" else 1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wait, not_at_all = Slowness(accelerator.process_index == slow_rank).wait, Slowness(False).wait
    # The slow optimizer of a rank, as one that offloads would be.
    if slow == "optimizer":
        optimizer.register_step_pre_hook(wait)
    reads = wait if slow in ("data", "accumulating") else not_at_all
    loader = DataLoader(Samples(samples, reads), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seconds = 0.0
    for _ in range(epochs):
        began = time.monotonic()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                if slow == "forward":
                    wait()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        seconds += time.monotonic() - began
        # No part of a step: a validation takes none.
        for _ in loader if epochs > 1 else ():
            time.sleep(WAIT)
    return seconds


@pytest.mark.parametrize("slow", ["data", "forward", "optimizer", "accumulating"])
def test_the_slow_rank_is_named_with_its_reason(slow):
    run = notebook_launcher(train, (slow,), num_processes=2, view="none")
    (line,) = step_lines(run.state)
    if slow in ("data", "accumulating"):
        assert line.startswith("rank 1 waits ")
        assert line.endswith("% of each step for data")
    else:
        assert line.startswith("rank 0 waits ")
        assert line.endswith(f"% of each step for rank 1's {slow}")
    # Steps of ranks that wait for one another take as long, and the sum of the parts.
    times = [rank.step_times for rank in run.state.ranks]
    for each in times:
        parts = each.data + each.forward + each.backward + each.optimizer + each.rest
        assert each.total == pytest.approx(parts + each.collectives)
        assert each.num_steps == (19 if slow == "accumulating" else 39)
        assert each.total / each.num_steps > 0.9 * WAIT * 1e9
    assert times[0].collectives > max(times[0].total / 2, times[1].collectives)
    text = summary_lines(run.state, now=0.0)
    assert line in text
    assert any(one.startswith("rank  a step") and "collectives" in one for one in text)


def test_a_pause_is_no_part_of_a_step_and_of_no_rate():
    args = ("data", 1, 1, 1_000_000)
    run = notebook_launcher(train, args, num_processes=2, view="none", block=False)
    eventually(lambda: run.state.ranks[0].steps > 3, within=60, what="it trains")
    run.pause()
    time.sleep(2)
    run.go_on()
    run.stop()
    with pytest.raises(RunStopped):
        run.wait()
    state = run.state
    seconds = state.ended - state.started - state.paused_seconds
    assert state.paused_seconds > 2
    assert all(each.step_times.total < seconds * 1e9 for each in state.ranks)
    expected = wording.rate(state.ranks[0].batches / seconds, "batch")
    assert expected in summary_lines(state, now=state.ended)[3]


def test_passes_without_a_step_are_no_part_of_one():
    run = notebook_launcher(train, ("", 0, 2), num_processes=1, view="none")
    (rank,) = run.state.ranks
    assert rank.step_times.num_steps == 159
    assert rank.step_times.total < (run[0] + 0.5 * 160 * WAIT) * 1e9


def test_one_rank_that_waits_for_data_hears_of_it(capsys):
    run = notebook_launcher(train, ("data", 0), num_processes=1, view="text")
    head, (_, duration, data, *_) = step_table(run.state)
    assert head[:3] == ("rank", "a step", "data")
    assert duration.endswith(" ms")
    assert int(data.removesuffix("%")) > 50
    printed = capsys.readouterr().out
    assert "the training waits" in printed
    assert "num_workers" in printed


def fill_memory():
    accelerator = Accelerator()
    model = nn.Linear(1000, 1000)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.backward(model(torch.ones(1, 1000)).sum())
    optimizer.step()
    raise torch.OutOfMemoryError("device out of memory")


def test_an_out_of_memory_error_names_what_takes_the_memory():
    with pytest.raises(Exception, match="out of memory") as raised:
        notebook_launcher(fill_memory, num_processes=1, view="none")
    expected = "What took the memory of rank 0: optimizer 8 MB, weights 4 MB, gradients 4 MB"
    assert expected in str(raised.value)
