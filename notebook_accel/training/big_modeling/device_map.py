"""Device maps: name of a module or tensor -> where it lives, the longest matching name first."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Module

__all__ = ["check_device_map", "clean_device_map", "device_of", "is_below", "is_in_any"]

_Map = TypeVar("_Map", bound=MutableMapping[str, Any])


def is_below(name: str, parent: str) -> bool:
    """Whether ``name`` is ``parent`` or something inside it; everything is below ``""``."""
    return not parent or name == parent or name.startswith(f"{parent}.")


def is_in_any(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor is inside one of some modules, each named by its path or by a word of it."""
    words = name.split(".")
    return any(module in words or is_below(name, module) for module in modules)


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device of a tensor, from the closest of the modules around it.

    Raises:
        ConfigError: the map says nothing about it.
    """
    around = name
    while around and around not in device_map:
        around = around.rpartition(".")[0]
    if around not in device_map:
        raise ConfigError(
            f"the device map has no device for {name}: add its name, that of a module around "
            'it, or "" for all that is left'
        )
    return device_map[around]


def check_device_map(model: Module, device_map: Mapping[str, Any]) -> None:
    """Check that each weight of a model has a device, and warn of names that the model lacks.

    Raises:
        ConfigError: some weights have none; it names them.
    """
    known = {name for name, _ in model.named_modules()}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(f"the device map names what the model does not have: {unknown}", stacklevel=2)
    missing = [
        name
        for name in model.state_dict()
        if not any(is_below(name, parent) for parent in device_map)
    ]
    if missing:
        raise ConfigError(
            f"the device map gives no device to these weights: {', '.join(missing)}. Add their "
            'names, those of modules around them, or "" for all that is left'
        )


def clean_device_map(device_map: _Map, module_name: str = "") -> _Map:
    """Join entries: where all parts of a module are on one device, it stands for them.

    A part that is the only entry below its module keeps its own name.

    Args:
        device_map: is changed, and returned.
        module_name: the module to begin with; ``""`` for the whole model.
    """
    below = [name for name in device_map if is_below(name, module_name)]
    if len(below) > 1 and len({str(device_map[name]) for name in below}) == 1:
        device = device_map[below[0]]
        for name in below:
            del device_map[name]
        device_map[module_name] = device
        return device_map
    depth = len(module_name.split(".")) + 1 if module_name else 1
    children = {".".join(name.split(".")[:depth]) for name in below if name != module_name}
    for child in sorted(children - {module_name}):
        clean_device_map(device_map, child)
    return device_map
