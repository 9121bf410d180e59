"""The device functions for torch_xla, such as ``torch.cuda`` has for CUDA.

Torch has no such module for XLA: ``torch.accelerator`` and ``torch.get_device_module`` do not know
this device type. torch_xla is slow to import, so it is imported only when a rank computes on XLA.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from notebook_accel import tpu
from notebook_accel.errors import ConfigError
from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives.exchange import Exchange

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


def connect() -> Exchange:
    """Return the collectives among the ranks that torch_xla connects."""
    from notebook_accel.training.xla.xla_collectives import XlaExchange

    return XlaExchange()


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
