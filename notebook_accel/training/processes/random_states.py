"""Read and restore the random states of one rank, as checkpoints store them.

They are the states of the global random numbers of Python, numpy, torch's CPU and the rank's
device, in a dictionary under Accelerate's names for them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from notebook_accel.training.processes import devices

_NUMPY_WORDS = 624  # of the state of its Mersenne twister


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
    return states if own is None else {**states, _device_key(device): own}


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
    own = states.get(_device_key(device))
    if isinstance(own, (list, tuple)):  # of all devices that the rank saw, as Accelerate keeps them
        own = own[0] if len(own) == 1 else dict(enumerate(own)).get(device.index or 0)
    if own is not None:
        devices.set_rng_state(device, own)


def _device_key(device: torch.device) -> str:
    return f"torch_{device.type}_manual_seed"
