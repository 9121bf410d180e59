"""Seed random numbers; read, restore, and copy random states from rank 0 to all ranks.

The random states of a rank are those of the global random numbers of Python, numpy, torch's CPU and
the rank's device, in a dictionary under Accelerate's names for them, as checkpoints store them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives import broadcast, num_ranks, this_rank
from notebook_accel.training.processes import devices
from notebook_accel.training.processes.topology import is_established, topology

_NUMPY_WORDS = 624  # of the state of its Mersenne twister


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
    if is_established() and (driver := devices.driver(topology().device.type)):
        driver.manual_seed(seed)  # torch's own does not reach such a device
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


def get_random_states(device: torch.device = devices.HOST) -> dict[str, Any]:
    """Return the random states of Python, numpy, torch and the rank's device.

    They are plain values and tensors, ready to be saved; :func:`set_random_states` restores them.
    """
    of_numpy: Any = np.random.get_state(legacy=False)
    if of_numpy["bit_generator"] == "MT19937":  # the default; others have no tuple
        words = of_numpy["state"]
        of_gauss = of_numpy["has_gauss"], of_numpy["gauss"]
        of_numpy = ("MT19937", words["key"].tolist(), words["pos"], *of_gauss)
    own = get_torch_states(device)
    return {"random_state": random.getstate(), "numpy_random_seed": of_numpy, **own}


def get_torch_states(device: torch.device) -> dict[str, Any]:
    """Return the random states of torch's CPU and of the device only; it takes a microsecond."""
    states = {"torch_manual_seed": torch.get_rng_state()}
    own = devices.get_rng_state(device)
    return states if own is None else {**states, f"torch_{device.type}_manual_seed": own}


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the random states that :func:`get_random_states` gave.

    Args:
        states: the states. The device's state may be missing, or be a list of the states of all
            devices, as Accelerate saves them.
        device: the device of this rank.

    Raises:
        KeyError, TypeError, ValueError: ``states`` has another form than these functions return.
    """
    of_numpy = states["numpy_random_seed"]
    if not isinstance(of_numpy, dict):
        kind, keys, *rest = of_numpy
        if not 0 <= rest[0] <= _NUMPY_WORDS:
            # numpy reads beyond its memory there, and the process dies.
            raise ValueError(f"numpy's position is {rest[0]}: expected 0 to {_NUMPY_WORDS}")
        of_numpy = (kind, np.asarray(keys, dtype=np.uint32), *rest)
    version, internal, gauss = states["random_state"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(of_numpy)
    torch.set_rng_state(states["torch_manual_seed"])
    own = states.get(f"torch_{device.type}_manual_seed")
    if isinstance(own, (list, tuple)):  # of all devices that the rank saw, as Accelerate keeps them
        own = own[0] if len(own) == 1 else dict(enumerate(own)).get(device.index or 0)
    if own is not None:
        devices.set_rng_state(device, own)
