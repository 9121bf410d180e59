"""A pause gives the devices back, and the training goes on to the bit."""

import time

import pytest
import torch

from notebook_accel import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    RunStopped,
    set_seed,
    sweep,
    wire,
)
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.run import call_of
from notebook_accel.launch.view import View
from tests.accelerator.ranks import RANKS
from tests.launches import launch
from tests.waiting import eventually

SOON = 60.0


def train(num_batches, kind):
    """Return the losses, and what lies on the device in a pause, seen from a thread."""
    import threading

    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "FSDP2" else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    optimizers = [torch.optim.AdamW(model.parameters())]
    if kind == "plain DDP":
        model.to(accelerator.device)
        optimizers = [torch.optim.AdamW(part.parameters()) for part in (model[:2], model[2:])]
        model = torch.nn.parallel.DistributedDataParallel(model)
    loader = torch.utils.data.DataLoader(torch.randn(num_batches * 8, 512), batch_size=4)
    if kind != "plain DDP":
        model, optimizers[0], loader = accelerator.prepare(model, optimizers[0], loader)
    accelerator.knob("ready", 0)
    device = torch.get_device_module(accelerator.device)
    held = []
    ends = threading.Event()

    def look():
        while not ends.wait(0.01):
            held.append(device.memory_allocated())

    threading.Thread(target=look, daemon=True).start()
    losses = []
    for inputs in loader:
        loss = model(inputs.to(accelerator.device)).square().mean()
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        time.sleep(0.02)
    ends.set()
    return losses, held[20:]


def start(kind, **asked):
    config = LaunchConfig(num_processes=RANKS)
    return launch(train, (75 * RANKS, kind), config=config, **asked)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "plain DDP"])
def test_ten_pauses_free_the_device_and_change_nothing(kind):
    twin = start(kind)
    run = start(kind, block=False)
    eventually(
        lambda: all(rank.steps > 25 for rank in run.state.ranks), within=SOON, what="it trains"
    )
    for _ in range(10):
        run.pause()
        time.sleep(0.1)
        run.go_on()
    for (losses, held), (expected, _) in zip(run, twin, strict=True):
        assert losses == expected
        # DDP's own buckets, one model's size, are nobody's to take from it.
        buckets = 0 if kind == "FSDP2" else 4 * 4 * (512 * 512 + 512)
        assert min(held) <= 0.1 * max(held) + buckets


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def train_what_is_slow_to_move(method):
    """Train a model whose state moves as slowly, by this method of tensors, as a large one's."""
    accelerator = Accelerator()
    loader = torch.utils.data.DataLoader(torch.ones(100_000, 64), batch_size=2)
    model, optimizer, loader = accelerator.prepare(*made(), loader)
    plain = getattr(torch.Tensor, method)

    def slow(tensor, *args):
        if tensor.dtype == torch.uint8:  # the memory as it is
            time.sleep(0.3)
        return plain(tensor, *args)

    setattr(torch.Tensor, method, slow)
    for inputs in loader:
        accelerator.backward((model(inputs) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("method", "press"), [("cpu", "interrupt"), ("copy_", "interrupt"), ("copy_", "stop")]
)
def test_the_training_is_kept_where_the_run_ends_while_its_state_is_moved(method, press):
    config = LaunchConfig(num_processes=RANKS)
    run = launch(train_what_is_slow_to_move, (method,), config=config, view=View(), block=False)
    eventually(lambda: all(rank.steps for rank in run.state.ranks), within=SOON, what="it trains")
    pausing = call_of(run).act(wire.Action(kind="pause"))
    if method == "copy_":
        pausing.result(SOON)
    else:
        time.sleep(1)
    call_of(run).press(1) if press == "interrupt" else run.stop()
    with pytest.raises(RunStopped):
        run.wait(SOON)
    model, optimizer = made()
    for _ in range(run.rescued.step):
        (model(torch.ones(2, 64)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(run.rescued.weights[0][name], value, atol=1e-4), name


def trial(lr):
    accelerator = Accelerator()
    loader = torch.utils.data.DataLoader(torch.ones(4_000, 64), batch_size=2)
    model, optimizer, loader = accelerator.prepare(*made(), loader)
    for step, inputs in enumerate(loader):
        accelerator.log({"loss": lr}, step=step)
        accelerator.backward((model(inputs) - 1).square().mean())
        optimizer.step()
        time.sleep(0.01)


def test_stop_all_brings_the_paused_trials_of_a_device_back_one_after_the_other(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path))
    asked = {"metric": "loss", "rounds": 100, "view": "none", "block": False}
    found = sweep(trial, {"lr": [0.1, 0.2, 0.3, 0.4]}, devices=(0,), **asked)
    states = lambda: sorted(run.status for run in found)  # noqa: E731
    all_began = ["paused", "paused", "paused", "running"]
    eventually(lambda: states() == all_began, within=SOON, what="each has had a turn")
    found.stop()
    most = 0
    while any(not run.state.has_ended for run in found):
        there = [run for run in found if not run.state.has_ended and run.status != "paused"]
        most = max(most, len(there))
        time.sleep(0.001)
    found.wait(SOON)
    assert most == 1, "there may be room for one"
    assert states() == ["stopped"] * 4
    assert all(run.rescued is not None for run in found)
