"""The random numbers of one rank, as a checkpoint keeps them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from notebook_accel.training.processes import devices

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "random_states_unchanged_since",
    "as_plain",
    "get_random_states",
    "note_random_states",
    "note_torch_states",
    "set_random_states",
]

_NUMPY_WORDS = 624  # of the state of its Mersenne twister


def get_random_states(device: torch.device) -> dict[str, Any]:
    """Return the random states of Python, numpy, torch and the device, in plain values."""
    return {**as_plain(note_random_states()), **note_torch_states(device)}


def note_torch_states(device: torch.device) -> dict[str, Any]:
    """Return the random states of torch and of the device alone."""
    states = {"torch_manual_seed": torch.get_rng_state()}
    own = devices.get_rng_state(device)
    return states if own is None else {**states, _device_key(device): own}


def note_random_states() -> dict[str, Any]:
    """Give those of the host in a form that costs little, since loaders note them in each pass."""
    return {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }


def as_plain(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return random states in plain values and tensors, as files keep them."""
    kind, keys, *rest = states["numpy_random_seed"]
    return {**states, "numpy_random_seed": (kind, np.asarray(keys).tolist(), *rest)}


def random_states_unchanged_since(states: Mapping[str, Any]) -> bool:
    """Whether the states of the host are still what :func:`note_random_states` gave.

    The cheapest are compared first, since loaders ask it.
    """
    if not torch.equal(torch.get_rng_state(), states["torch_manual_seed"]):
        return False
    if random.getstate() != states["random_state"]:
        return False
    now: Any = np.random.get_state()
    before = states["numpy_random_seed"]
    return bool(now[2:] == before[2:] and np.array_equal(now[1], before[1]))


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore random states from :func:`get_random_states` or :func:`note_random_states`.

    Raises:
        KeyError, TypeError, ValueError: it is not such a state.
    """
    kind, keys, *rest = states["numpy_random_seed"]
    if not 0 <= rest[0] <= _NUMPY_WORDS:
        # numpy reads beyond its memory there, and the process dies.
        raise ValueError(f"numpy's position is {rest[0]}: expected 0 to {_NUMPY_WORDS}")
    version, internal, gauss = states["random_state"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch_manual_seed"])
    own = states.get(_device_key(device))
    if isinstance(own, (list, tuple)):  # of all devices that the rank saw, as Accelerate keeps them
        own = own[0] if len(own) == 1 else dict(enumerate(own)).get(device.index or 0)
    if own is not None:
        devices.set_rng_state(device, own)


def _device_key(device: torch.device) -> str:
    return f"torch_{device.type}_manual_seed"
