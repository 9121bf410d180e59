"""One tensor of a module: finding it, and putting it on a device, with a value or without.

A weight that several modules share would be copied once for each of them. A *tied map*, address of
the original -> {device: its copy}, is shared by all hooks of one dispatched model, so that each
device gets one copy: the first that needs it makes it, the others find it there.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Union

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training import devices
from notebook_accel.training.big_modeling.dtypes import as_dtype

if TYPE_CHECKING:
    from torch.nn import Module

    from notebook_accel.training.big_modeling.dtypes import AnyDtype

__all__ = [
    "AnyDevice",
    "TiedMap",
    "as_device",
    "check_device_same",
    "id_tensor_storage",
    "named_module_tensors",
    "non_persistent_buffers",
    "set_module_tensor_to_device",
]

AnyDevice = Union[int, str, torch.device]
"""A device, its text, or the index of an accelerator."""

TiedMap = MutableMapping[int, dict[torch.device, torch.Tensor]]
"""Address of an original -> its copy on each device."""


def as_device(device: AnyDevice) -> torch.device:
    """The device that a text or an index stands for.

    Raises:
        ConfigError: an index is given and this process sees no accelerator.
    """
    if isinstance(device, int) and not torch.accelerator.is_available():
        raise ConfigError(
            f"device {device} is an accelerator's index, and this process sees no accelerator: "
            'use "cpu" or "disk"'
        )
    return torch.device(device)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are one; an accelerator without an index is the first of its kind."""
    first, second = (
        (device.type, 0 if device.type == "cpu" else device.index or 0)
        for device in (first_device, second_device)
    )
    return first == second


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What is equal for two tensors that share memory: device, address and bytes of the memory.

    A meta tensor has none: address 0.
    """
    storage = tensor.untyped_storage()
    address = 0 if tensor.device.type == "meta" else storage.data_ptr()
    return tensor.device, address, storage.nbytes()


def named_module_tensors(
    module: Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Go over a module's parameters, then its buffers, with their names.

    Args:
        module: any.
        include_buffers: give the buffers too.
        recurse: give those of the modules inside too.
        remove_non_persistent: leave out the buffers that no state dict has.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = non_persistent_buffers(module, recurse=recurse) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def non_persistent_buffers(module: Module, *, recurse: bool = False) -> set[str]:
    """The names of the buffers that no state dict has."""
    owners = module.named_modules() if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in owners
        for name in owner._non_persistent_buffers_set
    }


def set_module_tensor_to_device(
    module: Module,
    tensor_name: str,
    device: AnyDevice,
    value: torch.Tensor | None = None,
    dtype: AnyDtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer on a device, and give it a value if one is passed.

    Args:
        module: owns the tensor, or owns modules that do.
        tensor_name: with dots for modules inside.
        device: where to; "meta" drops the value.
        value: what the tensor shall hold; needed to leave the meta device.
        dtype: the type to have; None keeps the tensor's own. Whole numbers are not cast to it.
        fp16_statistics: the row scales of an 8-bit weight of bitsandbytes.
        tied_params_map: copies that other modules made of the same original, and may use.
        non_blocking: don't wait for the copy (from pinned memory).
        clear_cache: give back to the driver what the old tensor held on an accelerator.

    Raises:
        ConfigError: there is no such tensor, the value has another shape, or a value is missing.
        AttributeError: there is no such module.
    """
    owner_name, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(owner_name)
    old = _tensor_of(owner, name)
    target = as_device(device)
    _check_value(owner, name, old, target, value)
    if value is None and old.device == target and dtype is None:
        return
    source = old if value is None else value
    copies = _copies_of(source, target, tied_params_map)
    new = None if copies is None else copies.get(target)
    if new is None:
        with torch.no_grad():
            wanted = _wanted_type(old, source, value, dtype)
            new = _as_own_class(old, source.to(target, wanted, non_blocking=non_blocking))
    if copies is not None:
        copies[target] = new
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(new.device)  # type: ignore[attr-defined]
    # Not setattr: it refuses a parameter that became a meta tensor of a class of its own.
    owned: Any = owner._buffers if name in owner._buffers else owner._parameters
    owned[name] = new
    if clear_cache and old.device.type not in ("cpu", "meta") and old.device != target:
        devices.empty_cache(old.device)


def _tensor_of(owner: Module, name: str) -> torch.Tensor:
    tensor: torch.Tensor | None = owner._parameters.get(name)
    if tensor is None:
        tensor = owner._buffers.get(name)
    if tensor is None:
        raise ConfigError(
            f"{type(owner).__name__} has no parameter or buffer {name!r}; it has "
            f"{[key for key, _ in named_module_tensors(owner)]}"
        )
    return tensor


def _check_value(
    owner: Module,
    name: str,
    old: torch.Tensor,
    target: torch.device,
    value: torch.Tensor | None,
) -> None:
    if value is None and old.device.type == "meta" and target.type != "meta":
        raise ConfigError(f"{name} is on the meta device: pass the value that it gets on {target}")
    # The packed weights of bitsandbytes have another shape than those that they are made from.
    if value is not None and value.shape != old.shape and not _is_quantised(old):
        raise ConfigError(
            f"{name} of {type(owner).__name__} has the shape {tuple(old.shape)}, and the value "
            f"for it has {tuple(value.shape)}: it belongs to another model"
        )


def _copies_of(
    source: torch.Tensor, target: torch.device, tied: TiedMap | None
) -> dict[torch.device, torch.Tensor] | None:
    """Where copies of a tied weight are kept; None for a weight that is not tied."""
    if tied is None or "meta" in (target.type, source.device.type):
        return None
    return tied.get(source.data_ptr())


def _wanted_type(
    old: torch.Tensor,
    source: torch.Tensor,
    value: torch.Tensor | None,
    dtype: AnyDtype | None,
) -> torch.dtype:
    wanted = None if dtype is None else as_dtype(dtype)
    if not isinstance(wanted, torch.dtype):
        return source.dtype if _is_quantised(old) or value is None else old.dtype
    return wanted if source.is_floating_point() or source.is_complex() else source.dtype


def _as_own_class(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The new tensor as what the old one was: a buffer, a parameter, or one of bitsandbytes."""
    if not isinstance(old, torch.nn.Parameter):
        return new
    if type(new) is type(old) and new.requires_grad == old.requires_grad:
        return new
    own: dict[str, Any] = vars(old) if _is_quantised(old) else {}
    made = type(old)(new, requires_grad=old.requires_grad, **own)
    # A parameter of bitsandbytes quantises its value when it is moved, to where it is too.
    return made.to(new.device) if own and new.device.type != "meta" else made


def _is_quantised(tensor: torch.Tensor) -> bool:
    return type(tensor).__module__.startswith("bitsandbytes.")
