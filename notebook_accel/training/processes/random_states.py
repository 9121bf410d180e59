"""The random numbers of one rank, as a checkpoint keeps them."""

from __future__ import annotations

import ctypes
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
# The memory of its generator as last seen, and the state that it means.
_known_numpy: tuple[bytes, Any] = b"", None


def get_random_states(device: torch.device) -> dict[str, Any]:
    """Give those of Python, numpy, torch and the rank's device, in plain values and tensors."""
    states = as_plain({**note_random_states(), "numpy_random_seed": np.random.get_state()})
    return {**states, **note_torch_states(device)}


def note_torch_states(device: torch.device) -> dict[str, Any]:
    """Give those of torch and the device alone, which cost a microsecond."""
    states = {"torch_manual_seed": torch.get_rng_state()}
    own = devices.get_rng_state(device)
    return states if own is None else {**states, _device_key(device): own}


def note_random_states() -> dict[str, Any]:
    """Return the random states of the host cheaply; loaders call this in each pass."""
    return {
        "random_state": random.getstate(),
        "numpy_random_seed": _numpy_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }


def _numpy_state() -> Any:
    """What ``np.random.get_state()`` gives, without its 75 us where nothing was drawn since.

    Whether something was is told by the memory of the generator (624 words and a position, by the
    address that numpy gives for such uses). But for one thing: every second normal number is kept
    from the draw before, beside that memory. While one is kept, numpy is asked; and a state that is
    put back may have one, so :func:`set_random_states` forgets what is known. (Not seen: a
    ``np.random.set_state`` of the user's that brings one back at the very position last seen.)
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
    """Convert random states to plain values and tensors, as files store them."""
    kind, keys, *rest = states["numpy_random_seed"]
    return {**states, "numpy_random_seed": (kind, np.asarray(keys).tolist(), *rest)}


def random_states_unchanged_since(states: Mapping[str, Any]) -> bool:
    """Return whether the host's random states equal those of :func:`note_random_states`.

    The cheapest states are compared first, since loaders call this in each pass.
    """
    if not torch.equal(torch.get_rng_state(), states["torch_manual_seed"]):
        return False
    if random.getstate() != states["random_state"]:
        return False
    now, before = _numpy_state(), states["numpy_random_seed"]
    return now is before or (now[2:] == before[2:] and np.array_equal(now[1], before[1]))


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put back what :func:`get_random_states` or :func:`note_random_states` gave.

    Raises:
        KeyError, TypeError, ValueError: it is not such a state.
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
