"""Seed random numbers, and copy random states from rank 0 to all ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives import broadcast, num_ranks, this_rank
from notebook_accel.training.processes import devices
from notebook_accel.training.processes.topology import is_established, topology


def new_generator(seed: int) -> torch.Generator:
    """Return a seeded generator for tensors made without ``device=``, such as sample orders.

    It is on torch's default device (``torch.set_default_device``), since torch accepts no generator
    of another device for such tensors.
    """
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the random numbers of Python, numpy and torch, on every device.

    Args:
        seed: a whole number from 0 up to, but not including, 2**63.
        device_specific: whether to add the rank to the seed, so that each rank draws its own
            numbers.
        deterministic: whether torch uses deterministic algorithms from now on; operations that
            have none then raise.

    Example:
        >>> import torch
        >>> from notebook_accel import set_seed
        >>> set_seed(0)
        >>> first = torch.rand(2)
        >>> set_seed(0)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    if device_specific:
        seed += this_rank() if num_ranks() > 1 else current().rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if is_established():
        devices.manual_seed(topology().device, seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(
    rng_type: str | None = None, generator: torch.Generator | None = None
) -> None:
    """Copy one random state from rank 0 to every rank; all ranks have to call it.

    Args:
        rng_type: "torch" (torch's CPU random state), "generator", or a device type such as "cuda".
        generator: the generator whose state is copied, if ``rng_type`` is "generator".

    Raises:
        ValueError: "generator" was given without a generator, or there is no such type.

    Example:
        >>> from notebook_accel.utils import synchronize_rng_state
        >>> synchronize_rng_state("torch")
    """
    kind = str(getattr(rng_type, "value", rng_type))
    if kind == "generator":
        if generator is None:
            raise ValueError(
                "rng_type='generator' and generator=None: pass the generator whose state is meant"
            )
        generator.set_state(broadcast(generator.get_state()))
        return
    if kind == "torch":
        torch.set_rng_state(broadcast(torch.get_rng_state()))
        return
    try:
        device: Any = devices.device_module(kind)
    except RuntimeError:
        raise ValueError(
            f"rng_type={kind!r}: expected 'torch', 'generator', or a device type that torch knows"
        ) from None
    device.set_rng_state(broadcast(device.get_rng_state()))


def synchronize_rng_states(
    rng_types: Iterable[str], generator: torch.Generator | None = None
) -> None:
    """Copy several random states from rank 0 to every rank; all ranks have to call it.

    Args:
        rng_types: "torch" (torch's CPU random state), "generator", or device types such as "cuda".
        generator: the generator whose state is copied, if "generator" is among the types.

    Raises:
        ValueError: "generator" was given without a generator, or there is no such type.

    Example:
        >>> from notebook_accel import synchronize_rng_states
        >>> synchronize_rng_states(["torch"])
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)
