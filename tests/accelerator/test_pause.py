"""A pause gives the devices back, and the training goes on to the bit."""

import time

import pytest
import torch

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, set_seed
from notebook_accel.config import LaunchConfig
from tests.accelerator.ranks import RANKS
from tests.launches import launch
from tests.waiting import eventually

SOON = 60.0


def train(num_batches, fsdp):
    """Return the losses, and what lies on the device in a pause, seen from a thread."""
    import threading

    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.randn(num_batches * 8, 512), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        time.sleep(0.02)
    ends.set()
    return losses, held[20:]


def start(fsdp, **asked):
    config = LaunchConfig(num_processes=RANKS)
    return launch(train, (75 * RANKS, fsdp), config=config, **asked)


@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_ten_pauses_free_the_device_and_change_nothing(fsdp):
    twin = start(fsdp)
    run = start(fsdp, block=False)
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
        buckets = 0 if fsdp else 4 * 4 * (512 * 512 + 512)
        assert min(held) <= 0.1 * max(held) + buckets
