"""The device functions for torch_xla, which torch has in a module for other device types.

Torch does not know the kind: ``torch.accelerator`` and ``torch.get_device_module`` have nothing of
it. torch_xla is imported as soon as a rank computes on it, and not before.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel import tpu
from notebook_accel.errors import ConfigError
from notebook_accel.launch.rank import current

if TYPE_CHECKING:
    from notebook_accel.training.collectives.exchange import Exchange

__all__ = [
    "begin_batch",
    "connect",
    "device",
    "end_step",
    "get_rng_state",
    "is_used",
    "manual_seed",
    "memory_allocated",
    "set_rng_state",
]

_HAS_BATCHES = "batches since the last step on XLA"


def is_used() -> bool:
    """Return whether this rank computes on XLA, by PJRT_DEVICE or since there is a TPU.

    Raises:
        ConfigError: PJRT_DEVICE says so, and torch_xla does not fit torch.
    """
    found = tpu.library()
    if found is None or found.name != "torch_xla":
        return False
    if found.problem and os.environ.get("PJRT_DEVICE"):
        raise ConfigError(f"PJRT_DEVICE={os.environ['PJRT_DEVICE']}, but {found.problem}")
    return not found.problem and bool(os.environ.get("PJRT_DEVICE") or tpu.is_torch_xlas())


def device() -> torch.device:
    """Return the XLA device of this rank, seeded with the seed of torch."""
    import torch_xla

    found: torch.device = torch_xla.device()
    manual_seed(torch.initial_seed())
    return found


def connect() -> Exchange:
    """Return the collectives of torch_xla's ranks."""
    from notebook_accel.training.collectives.xla import XlaExchange

    return XlaExchange()


def begin_batch() -> None:
    """Run the operations recorded since the last batch: XLA only records them until then.

    torch_xla's MpDeviceLoader does the same at each batch, but reads two dozen batches ahead in
    threads: then the batch of the loop is unknown, and with it where to resume.
    """
    import torch_xla

    current().shared[_HAS_BATCHES] = True
    torch_xla.sync()


def end_step() -> None:
    """Run the recorded operations, unless a prepared loader does so at its next batch."""
    if not current().shared.pop(_HAS_BATCHES, False):
        import torch_xla

        torch_xla.sync()


def manual_seed(seed: int) -> None:
    """Seed the device, which ``torch.manual_seed`` does not."""
    import torch_xla

    torch_xla.manual_seed(seed % 2**32)


def get_rng_state() -> torch.Tensor:
    """Return the state of the device's random numbers."""
    import torch_xla.core.xla_model as xm

    # A number without a sign, of 64 bits, of which torch has no tensors everywhere.
    state = xm.get_rng_state()
    return torch.tensor(state - (state >> 63 << 64), dtype=torch.int64, device="cpu")


def set_rng_state(state: torch.Tensor) -> None:
    """Restore a state of the device's random numbers, from :func:`get_rng_state`."""
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(int(state) % 2**64)


def memory_allocated(device: torch.device) -> int | None:
    """Return the bytes in use on the device; None if its runtime does not say."""
    import torch_xla.core.xla_model as xm

    try:
        info: dict[str, Any] = xm.get_memory_info(str(device))
    except RuntimeError:  # the CPU's
        return None
    return int(info["bytes_used"])
