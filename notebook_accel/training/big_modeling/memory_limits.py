"""How many bytes of weights each device may hold.

Limits are a mapping: the index of an accelerator, "mps", "cpu" or "disk" -> bytes, in the order in
which devices are filled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Union

import psutil

from notebook_accel.errors import ConfigError
from notebook_accel.training import devices
from notebook_accel.training.big_modeling.sizes import (
    compute_module_sizes,
    convert_file_size_to_int,
    get_module_leaves,
)

if TYPE_CHECKING:
    from torch.nn import Module

    from notebook_accel.training.big_modeling.dtypes import AnyDtype

__all__ = ["Limits", "MaxMemory", "get_balanced_memory", "get_max_memory"]

Limits = dict[Union[int, str], int]
"""Device -> bytes."""

MaxMemory = Mapping[Union[int, str], Union[int, str]]
"""Device -> bytes, or a text such as "2GB"."""

_HOSTS = ("mps", "cpu", "disk")
_log = logging.getLogger(__name__)


def get_max_memory(max_memory: MaxMemory | None = None) -> Limits:
    """Complete and check what each device may hold.

    Args:
        max_memory: None takes what is free now: on each accelerator, and in the host's memory.

    Returns:
        bytes by device: accelerators by index first, then "mps", "cpu" and "disk".

    Raises:
        ConfigError: a key is no device, or a text no size.
    """
    if max_memory is None:
        free: Limits = dict(devices.free_memory())
        return free if "mps" in free else {**free, "cpu": psutil.virtual_memory().available}
    unknown = [key for key in max_memory if not isinstance(key, int) and key not in _HOSTS]
    if unknown:
        raise ConfigError(
            f"max_memory has {unknown[0]!r}: expected the index of an accelerator (a whole "
            f"number), or one of {', '.join(_HOSTS)}"
        )
    indices = sorted(key for key in max_memory if isinstance(key, int))
    _warn_of_absent(indices)
    keys: list[int | str] = [*indices, *(key for key in _HOSTS if key in max_memory)]
    return {key: convert_file_size_to_int(max_memory[key]) for key in keys}


def _warn_of_absent(indices: Sequence[int]) -> None:
    names = devices.inventory().names
    for index in indices:
        if not 0 <= index < len(names):
            _log.warning(
                "max_memory names accelerator %d; this process sees %s",
                index,
                list(range(len(names))),
            )


def get_balanced_memory(
    model: Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    low_zero: bool = False,
) -> Limits:
    """Lower the limits so that accelerators are filled evenly, the last one aside.

    Each gets its share of the model, and a reserve of a quarter more than the largest block that
    must not be split, or than the mean layer, since layers do not end where shares do. The last
    keeps its limit: it takes what is left.

    Args:
        model: what will be spread.
        max_memory: as of :func:`get_max_memory`.
        no_split_module_classes: names of classes that must stay on one device.
        dtype: what the weights will be loaded in.
        special_dtypes: the type of single tensors, by name.
        low_zero: put as little as possible on accelerator 0, which then has room for other
            things (what generates text, say).

    Returns:
        the limits; as they were where there are fewer than two accelerators.
    """
    limits = get_max_memory(max_memory)
    usable = [key for key, size in limits.items() if isinstance(key, int) and size > 0]
    if len(usable) < 2:
        return limits
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    share = sizes[""] // (len(usable) - low_zero)
    share += _reserve(model, sizes, no_split_module_classes or ())
    for index in usable[:-1]:
        if not (low_zero and index == 0):
            limits[index] = min(share, limits[index])
    if low_zero and 0 in limits:
        others = sum(limits[index] for index in usable if index != 0)
        limits[0] = min(max(0, sizes[""] - others), limits[0])
    return limits


def _reserve(model: Module, sizes: Mapping[str, int], no_split: Sequence[str]) -> int:
    # The first block of each class stands for all of them, as layers of one class are alike.
    blocks = {
        type(module).__name__: sizes.get(name, 0)
        for name, module in reversed(list(model.named_modules()))
        if type(module).__name__ in no_split and name
    }
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    layers = [modules[name] for name in get_module_leaves(modules)]
    mean = sum(layers) // max(len(layers), 1)
    return int(1.25 * max(mean, *blocks.values(), 0))
