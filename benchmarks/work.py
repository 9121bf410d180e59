"""What peers run in their ranks: the same as we do, from a module, as some of them need."""

from __future__ import annotations

import os
import socket
import sys
import tempfile

import torch
from torch import nn

__all__ = [
    "LINES",
    "STEPS",
    "form_group",
    "free_port",
    "spawned_group",
    "spawned_nothing",
    "spawned_step",
    "spawned_training",
    "step",
]

# What each rank of ``many_ranks.py`` does: so many steps, with so many printed lines each.
STEPS = 20
LINES = 10


def step() -> int:
    """Build accelerate's Accelerator, make one AdamW step, and say how many ranks there are."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(4, 8)).sum())
    optimizer.step()
    return int(accelerator.num_processes)


def form_group() -> int:
    """Make a gloo group, meet in it, and end it."""
    torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return size


def spawned_step(rank: int, size: int, port: int) -> None:
    """``step`` as torch.multiprocessing starts it."""
    _describe(rank, size, port)
    assert step() == size


def spawned_group(rank: int, size: int, port: int) -> None:
    """``form_group`` as torch.multiprocessing starts it."""
    _describe(rank, size, port)
    assert form_group() == size


def spawned_nothing(_rank: int, _size: int, _port: int) -> None:
    """A rank that only starts and ends."""


def spawned_training(rank: int, size: int, port: int) -> None:
    """The training of ``many_ranks.py`` in bare torch, each rank's lines in a file of its own."""
    _describe(rank, size, port)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryFile("w") as sys.stdout:
        for step in range(STEPS):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for line in range(LINES):
                print("step", step, "line", line)
    # Without destroying the group: with two ranks in five tries one waited for ever in that.
    os._exit(0)


def _describe(rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
