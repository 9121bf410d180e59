"""What was prepared leaves its device while a run is paused, and comes back to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.nn import Module

from notebook_accel.training.collectives.nested import leaves
from notebook_accel.training.processes.devices import device_module
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer


@contextlib.contextmanager
def off_device(
    device: torch.device, models: Sequence[Module], optimizers: Sequence[AcceleratedOptimizer]
) -> Iterator[None]:
    """Move weights, gradients, buffers and optimizer states to the host within the block.

    The tensors stay the objects that they are: only the memory behind them is given back. What lies
    on the host already stays there.
    """
    kind = device.type
    if kind in ("cpu", "xla"):
        yield
        return
    module = device_module(kind)
    module.synchronize()
    copies = []
    for storage in _storages(models, optimizers, kind):
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copies.append((storage, storage.nbytes(), view.cpu()))
        del view
        storage.resize_(0)
    module.empty_cache()
    try:
        yield
    finally:
        while copies:
            storage, size, copy = copies.pop()
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)
        module.synchronize()


def _storages(
    models: Sequence[Module], optimizers: Sequence[AcceleratedOptimizer], kind: str
) -> list[torch.UntypedStorage]:
    """Return the memory on the device of all that was prepared, each piece once."""
    held = [[*model.parameters(), *model.buffers()] for model in models]
    states = [[one.param_groups, [*one.state.values()]] for one in optimizers]
    tensors = [one for one in leaves([held, states]) if isinstance(one, torch.Tensor)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    found = {}
    for tensor in tensors:
        # Not by a check for DTensor: its import takes a second, for sharded training alone.
        storage = getattr(tensor, "to_local", tensor.detach)().untyped_storage()
        if storage.device.type == kind and storage.nbytes():
            found[storage.data_ptr()] = storage
    return list(found.values())
