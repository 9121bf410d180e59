"""The device functions and collectives for torch_xla, such as torch has for CUDA.

Torch has no such module for XLA: ``torch.accelerator`` and ``torch.get_device_module`` do not know
this device type. torch_xla is slow to import, so it is imported only when a rank computes on XLA.
"""

from __future__ import annotations

import os
import pickle
import socket
from datetime import timedelta
from typing import Any

import torch

from notebook_accel import tpu
from notebook_accel.errors import ConfigError
from notebook_accel.rank.group_store import store_of_next_group
from notebook_accel.rank.this_rank import StorePort, current
from notebook_accel.training.collectives import Exchange

_HAS_BATCHES = "batches since the last step on XLA"


def is_used() -> bool:
    """Return whether this rank computes on XLA: PJRT_DEVICE is set, or there is a TPU.

    In both cases torch_xla has to be the installed TPU library.
    """
    found = tpu.library()
    if found is None or found.name != "torch_xla":
        return False
    if found.problem and os.environ.get("PJRT_DEVICE"):
        raise ConfigError(f"PJRT_DEVICE={os.environ['PJRT_DEVICE']}, but {found.problem}")
    return not found.problem and bool(os.environ.get("PJRT_DEVICE") or tpu.is_torch_xlas())


def device() -> torch.device:
    """Return the XLA device of this rank, after seeding it with torch's current seed."""
    import torch_xla

    found: torch.device = torch_xla.device()
    manual_seed(torch.initial_seed())
    return found


def begin_batch() -> None:
    """Run the operations that XLA has recorded; loaders call this before each batch.

    torch_xla's MpDeviceLoader does the same, but reads two dozen batches ahead in threads. Then it
    is unknown which batch the training loop has, and where a checkpoint has to resume.
    """
    import torch_xla

    current().shared[_HAS_BATCHES] = True
    torch_xla.sync()


def end_step() -> None:
    """End an optimizer step: run the recorded operations, if no prepared loader gave its batch.

    If a prepared loader gave the step's batch, :func:`begin_batch` runs them before the next batch.
    """
    if not current().shared.pop(_HAS_BATCHES, False):
        import torch_xla

        torch_xla.sync()


def manual_seed(seed: int) -> None:
    """Seed the XLA device's random numbers, which ``torch.manual_seed`` does not do."""
    import torch_xla

    torch_xla.manual_seed(seed % 2**32)


def get_rng_state() -> torch.Tensor:
    """Return the state of the XLA device's random numbers, as a CPU tensor of one number."""
    import torch_xla.core.xla_model as xm

    # A number without a sign, of 64 bits, of which torch has no tensors everywhere.
    state = xm.get_rng_state()
    return torch.tensor(state - (state >> 63 << 64), dtype=torch.int64, device="cpu")


def set_rng_state(state: torch.Tensor) -> None:
    """Set the state of the XLA device's random numbers to what :func:`get_rng_state` returned."""
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(int(state) % 2**64)


def memory_allocated(device: torch.device) -> int | None:
    """Return the bytes in use on the device; None if torch_xla does not tell the number."""
    import torch_xla.core.xla_model as xm

    try:
        info: dict[str, Any] = xm.get_memory_info(str(device))
    except RuntimeError:  # the CPU's
        return None
    return int(info["bytes_used"])


# All ranks of a launch are on one machine.
_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(minutes=5)
_SMALLEST_BYTES = 1024


class XlaExchange(Exchange):
    """Collectives of the ranks of one ``xmp.spawn``, each a thread with a device of its own.

    Making one is a collective itself: all ranks make theirs together.
    """

    backend = "xla"

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        self._xm: Any = xm
        self.rank = int(xr.global_ordinal())
        self.size = int(xr.world_size())
        self.local_rank = int(xr.local_ordinal())
        self.local_size = int(xr.local_process_count() * xr.addressable_runtime_device_count())
        self.device: torch.device = torch_xla.device()
        self._store: Any = None
        if self.size > 1:
            # Made while every rank is here, and learns its port: whoever uses it waits for nobody.
            listener = socket.create_server((_LOOPBACK, 0)) if self.rank == 0 else None
            (port, *_) = self.gather_object(listener and listener.getsockname()[1])
            at = StorePort(_LOOPBACK, port, listener)
            self._store = store_of_next_group(self.rank, _STORE_TIMEOUT, at)

    def gather(self, leaf: torch.Tensor) -> torch.Tensor:
        gathered = self._xm.all_gather(_countable(self._sent(leaf)), dim=0)
        return gathered.to(leaf.dtype).to(leaf.device)  # type: ignore[no-any-return]

    def reduce(self, leaf: torch.Tensor, reduction: str) -> torch.Tensor:
        total: torch.Tensor = self._xm.all_reduce(reduction, self._sent(leaf))
        return total.to(leaf.device)

    def broadcast(self, leaf: torch.Tensor, source: int) -> None:
        sent = _countable(self._sent(leaf)).clone()
        self._xm.collective_broadcast([sent], root_ordinal=source)
        leaf.detach().copy_(sent.to(leaf.dtype))

    def gather_object(self, mine: Any) -> list[Any]:
        if self.size == 1:
            return [mine]
        data = pickle.dumps(mine)
        sizes = self.gather(torch.tensor([len(data)])).tolist()
        length = _SMALLEST_BYTES
        while length < max(sizes):
            length *= 2
        padded = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
        rows = self.gather(padded).reshape(self.size, length)
        return [
            pickle.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)
        ]

    def store(self) -> Any:
        assert self._store is not None, "a rank alone leaves no notes"
        return self._store

    def barrier(self) -> None:
        self.reduce(torch.zeros(1), "sum")  # on the host: it is waited for

    def _sent(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach().to(self.device)


# What the ranks connect by.
connect = XlaExchange


def _countable(tensor: torch.Tensor) -> torch.Tensor:
    """Return booleans as uint8 (torch_xla gathers by sums), and other tensors unchanged."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
