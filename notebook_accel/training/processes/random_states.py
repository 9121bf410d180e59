"""Read, compare and restore the random states of one rank, as checkpoints store them.

They are the states of the global random numbers of Python, numpy, torch's CPU and the rank's
device, in a dictionary under Accelerate's names for them.
"""

from __future__ import annotations

import ctypes
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from notebook_accel.training.processes import devices

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMPY_WORDS = 624  # of the state of its Mersenne twister
# The memory of its generator as last seen, and the state that it means.
_known_numpy: tuple[bytes, Any] = b"", None


def get_random_states(device: torch.device) -> dict[str, Any]:
    """Return the random states of Python, numpy, torch and the rank's device.

    They are plain values and tensors, ready to be saved; :func:`set_random_states` restores them.
    """
    states = as_plain({**note_random_states(), "numpy_random_seed": np.random.get_state()})
    return {**states, **note_torch_states(device)}


def note_torch_states(device: torch.device) -> dict[str, Any]:
    """Return the random states of torch's CPU and of the device only; it takes a microsecond."""
    states = {"torch_manual_seed": torch.get_rng_state()}
    own = devices.get_rng_state(device)
    return states if own is None else {**states, _device_key(device): own}


def note_random_states() -> dict[str, Any]:
    """Return the random states of Python, numpy and torch's CPU, without that of the device.

    Loaders call it in each pass, so it has to be fast. To save the result in a file, convert it by
    :func:`as_plain`.
    """
    return {
        "random_state": random.getstate(),
        "numpy_random_seed": _numpy_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }


def _numpy_state() -> Any:
    """Return ``np.random.get_state()``, from a cache if possible, since numpy's call takes 75 us.

    The cache is valid while the generator's memory (624 words and a position) has not changed;
    numpy gives the address of that memory for such uses. One part of the state is not in it: numpy
    draws normal numbers in pairs and stores the second number of a pair elsewhere. So a state with
    a stored number is never cached, and :func:`set_random_states`, which may restore such a state,
    clears the cache. (One case goes unnoticed: the user's own ``np.random.set_state`` restores a
    stored number at exactly the position that is cached.)
    """
    global _known_numpy
    untyped: Any = np.random  # numpy's own types lack the function
    generator = untyped.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state()
    memory = ctypes.string_at(generator.ctypes.state_address, 4 * (_NUMPY_WORDS + 1))
    known, state = _known_numpy
    if memory == known:
        return state
    state = untyped.get_state()
    _known_numpy = (b"" if state[3] else memory), state
    return state


def as_plain(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return random states with numpy's array as a list, so that checkpoints can store them."""
    kind, keys, *rest = states["numpy_random_seed"]
    return {**states, "numpy_random_seed": (kind, np.asarray(keys).tolist(), *rest)}


def random_states_unchanged_since(states: Mapping[str, Any]) -> bool:
    """Return whether Python, numpy and torch's CPU still have the given random states.

    Args:
        states: from :func:`note_random_states`.
    """
    if not torch.equal(torch.get_rng_state(), states["torch_manual_seed"]):
        return False
    if random.getstate() != states["random_state"]:
        return False
    now, before = _numpy_state(), states["numpy_random_seed"]
    return now is before or (now[2:] == before[2:] and np.array_equal(now[1], before[1]))


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the random states that :func:`get_random_states` or :func:`note_random_states` gave.

    Args:
        states: the states. The device's state may be missing, or be a list of the states of all
            devices, as Accelerate saves them.
        device: the device of this rank.

    Raises:
        KeyError, TypeError, ValueError: ``states`` has another form than these functions return.
    """
    kind, keys, *rest = states["numpy_random_seed"]
    if not 0 <= rest[0] <= _NUMPY_WORDS:
        # numpy reads beyond its memory there, and the process dies.
        raise ValueError(f"numpy's position is {rest[0]}: expected 0 to {_NUMPY_WORDS}")
    global _known_numpy
    _known_numpy = b"", None
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
