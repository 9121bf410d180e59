"""The hook that brings a module's weights and inputs to the device that computes.

Where weights are offloaded, a module's own tensors are on the meta device between two forwards:
before one they are copied from a weights map (the host's memory, or files), after it they are
dropped again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.training.big_modeling.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    hook_of,
)
from notebook_accel.training.big_modeling.offload_store import PrefixedDataset
from notebook_accel.training.big_modeling.tensors import (
    as_device,
    named_module_tensors,
    non_persistent_buffers,
    set_module_tensor_to_device,
)
from notebook_accel.training.nested import find_device, send_to_device

if TYPE_CHECKING:
    from torch.nn import Module

    from notebook_accel.training.big_modeling.tensors import AnyDevice, TiedMap

__all__ = [
    "AlignDevicesHook",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "has_offloaded_params",
    "offloaded_values",
]


class AlignDevicesHook(ModelHook):
    """Puts inputs, and weights if they are offloaded, on the device where a module computes.

    Args:
        execution_device: where it computes; None leaves inputs and weights where they are.
        offload: keep the module's tensors on the meta device between forwards.
        io_same_device: give outputs back on the device of the first input.
        weights_map: the values by name; None keeps them in the host's memory.
        offload_buffers: offload buffers too, rather than keep them on the execution device.
        place_submodules: act for the modules inside too.
        skip_keys: keyword arguments, and keys of outputs, that stay where they are.
        tied_params_map: shared by the hooks of one model, as ``tensors`` explains.
    """

    def __init__(
        self,
        execution_device: AnyDevice | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedMap | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        # Filled when the hook is added: where detaching puts the module's tensors back.
        self.original_devices: dict[str, torch.device] = {}
        # Of the offloaded tensors, those whose copies other hooks use too.
        self._shared: set[str] = set()
        self._copied: set[tuple[int, torch.device]] = set()

    def __repr__(self) -> str:
        shown = ["execution_device", "offload", "io_same_device", "offload_buffers"]
        fields = ", ".join(f"{name}={getattr(self, name)}" for name in [*shown, "place_submodules"])
        return f"AlignDevicesHook({fields}, skip_keys={self.skip_keys!r})"

    def init_hook(self, module: Module) -> Module:
        if self.offload:
            self._offload(module)
        elif self.execution_device is not None:
            for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                self._bring(module, name)
        return module

    def _offload(self, module: Module) -> None:
        recurse = self.place_submodules
        self.original_devices = {
            name: tensor.device for name, tensor in named_module_tensors(module, recurse=recurse)
        }
        offloaded = dict(self._offloaded_tensors(module))
        if self.weights_map is None:
            self.weights_map = {name: tensor.to("cpu") for name, tensor in offloaded.items()}
        for name in self._resident_buffers(module) if self.execution_device is not None else ():
            self._bring(module, name)
        for name, tensor in offloaded.items():
            if self.tied_params_map is not None and tensor.data_ptr() in self.tied_params_map:
                self._share(name, self.tied_params_map)
            set_module_tensor_to_device(module, name, "meta")

    def _share(self, name: str, tied: TiedMap) -> None:
        """Share the copies of a tied weight, if its value stays in memory.

        One that is read from a file anew has another address each time, where the value of another
        weight may lie later.
        """
        assert self.weights_map is not None
        once, again = self.weights_map[name], self.weights_map[name]  # both are there at a time
        if once.data_ptr() == again.data_ptr():
            tied.setdefault(once.data_ptr(), {})
            self._shared.add(name)

    def _offloaded_tensors(self, module: Module) -> Iterator[tuple[str, torch.Tensor]]:
        """What is offloaded: no buffer that no state dict has, whose value would be lost."""
        return named_module_tensors(
            module,
            include_buffers=self.offload_buffers,
            recurse=self.place_submodules,
            remove_non_persistent=True,
        )

    def values(self, module: Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The values that it brings in for a module, with their names there."""
        for name, _ in self._offloaded_tensors(module):
            yield name, (self.weights_map or {})[name]

    def _resident_buffers(self, module: Module) -> list[str]:
        """The buffers that stay on the execution device."""
        recurse = self.place_submodules
        names = [name for name, _ in module.named_buffers(recurse=recurse)]
        lost = non_persistent_buffers(module, recurse=recurse)
        return [name for name in names if not self.offload_buffers or name in lost]

    def _bring(self, module: Module, name: str, value: Any = None, statistics: Any = None) -> None:
        assert self.execution_device is not None
        # A weight that is moved from where it is has its address; a value may have it by chance.
        shares = value is None or name in self._shared
        set_module_tensor_to_device(
            module,
            name,
            self.execution_device,
            value,
            fp16_statistics=statistics,
            tied_params_map=self.tied_params_map if shares else None,
        )

    def pre_forward(
        self, module: Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        if self.offload:
            self._fetch(module, device)
        return (
            send_to_device(args, device),
            send_to_device(kwargs, device, skip_keys=self.skip_keys),
        )

    def _fetch(self, module: Module, device: torch.device) -> None:
        assert self.weights_map is not None
        for name, _ in list(self._offloaded_tensors(module)):
            value = self.weights_map[name]
            copies = (self.tied_params_map or {}).get(value.data_ptr())
            if name in self._shared and copies is not None and device not in copies:
                # This module makes the copy that others use, and drops it after its forward.
                self._copied.add((value.data_ptr(), device))
            # The row scales of an 8-bit weight of bitsandbytes are stored beside it.
            is_8bit = value.dtype == torch.int8 and name.endswith("weight")
            scales = self.weights_map.get(f"{name[:-6]}SCB") if is_8bit else None
            self._bring(module, name, value, scales)

    def post_forward(self, module: Module, output: Any) -> Any:
        if self.offload:
            for name, _ in list(self._offloaded_tensors(module)):
                # The memory is not given back to the driver: the next module takes it at once.
                set_module_tensor_to_device(module, name, "meta", clear_cache=False)
            for address, device in self._copied:
                (self.tied_params_map or {}).get(address, {}).pop(device, None)
            self._copied.clear()
        if self.io_same_device and self.input_device is not None:
            return send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: Module) -> Module:
        for name, device in self.original_devices.items():
            if device.type != "meta":
                value = (self.weights_map or {}).get(name)
                set_module_tensor_to_device(module, name, device, value)
        return module


def _offloading_hook(module: Module) -> AlignDevicesHook | None:
    hook = hook_of(module)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    aligning = (one for one in hooks if isinstance(one, AlignDevicesHook))
    return next((one for one in aligning if one.offload), None)


def has_offloaded_params(module: Module) -> bool:
    """Whether a module's own weights are brought in for each forward."""
    return _offloading_hook(module) is not None


def offloaded_values(model: Module) -> dict[str, torch.Tensor]:
    """The values of all tensors that the hooks of a model bring in, by their names."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        hook = _offloading_hook(module)
        for name, value in () if hook is None else hook.values(module):
            found[f"{prefix}.{name}" if prefix else name] = value
    return found


@contextmanager
def align_module_device(
    module: Module, execution_device: AnyDevice | None = None
) -> Iterator[None]:
    """A block in which a module's own parameters are on a device, offloaded ones included.

    Args:
        module: its parameters are where they were again after the block.
        execution_device: None takes the device where an offloaded module computes, and leaves
            other modules where they are.
    """
    hook = _offloading_hook(module)
    if hook is None:
        with _moved(module, execution_device):
            yield
        return
    before = hook.execution_device
    hook.execution_device = before if execution_device is None else execution_device
    try:
        hook.pre_forward(module)
        yield
    finally:
        hook.post_forward(module, None)
        hook.execution_device = before


@contextmanager
def _moved(module: Module, device: AnyDevice | None) -> Iterator[None]:
    before = {name: weight.device for name, weight in module.named_parameters(recurse=False)}
    for name in before if device is not None else ():
        set_module_tensor_to_device(module, name, device)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, where in before.items():
            set_module_tensor_to_device(module, name, where)


def attach_execution_device_hook(
    module: Module,
    execution_device: AnyDevice,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Put a module and all inside on a device, each with a hook that brings its inputs there.

    Args:
        module: modules in it that have a hook keep theirs.
        execution_device: where they compute.
        skip_keys: as of :class:`AlignDevicesHook`.
        preload_module_classes: names of classes inside which no hook is needed, since what calls
            them brings all their weights.
        tied_params_map: as of :class:`AlignDevicesHook`.
    """
    if hook_of(module) is None and module.state_dict():
        hook = AlignDevicesHook(
            execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


def attach_align_device_hook(
    module: Module,
    execution_device: AnyDevice | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Give each module with tensors of its own an :class:`AlignDevicesHook`.

    Args:
        module: begins here.
        execution_device, offload, offload_buffers, skip_keys, tied_params_map: as of the hook.
        weights_map: the values by their names in the whole model.
        module_name: of ``module`` in the whole model.
        preload_module_classes: names of classes whose weights are brought in as a whole, since
            their forward uses weights of modules inside without calling them.
    """
    whole = offload and type(module).__name__ in (preload_module_classes or ())
    if whole or next(named_module_tensors(module), None) is not None:
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    for name, child in () if whole else module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: Module,
    execution_device: AnyDevice | Mapping[str, AnyDevice] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Give the blocks of a model hooks, each with a device and offloading of its own.

    The model as a whole gives its outputs back on the device of its inputs.

    Args:
        module: begins here.
        execution_device: by name of block, or one for all.
        offload: by name of block, or one for all.
        weights_map, offload_buffers, module_name, skip_keys, preload_module_classes,
        tied_params_map: as of :func:`attach_align_device_hook`.
    """
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        _attach_as_one_block(
            module,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            module_name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )
        return
    devices, offloads = _by_block(execution_device, offload)
    for name, block in list(module.named_modules(prefix=module_name)):
        device = devices.get(name)
        if name in devices and offloads.get(name):
            attach_align_device_hook(
                block,
                device,
                True,
                weights_map,
                offload_buffers,
                name,
                skip_keys,
                preload_module_classes,
                tied_params_map,
            )
        if not name or (name in devices and hook_of(block) is None):
            hook = AlignDevicesHook(
                device,
                io_same_device=not name,
                place_submodules=name in offloads and not offloads[name],
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(block, hook, append=True)
        if device is not None and name in offloads:
            preloaded = preload_module_classes if offloads[name] else None
            attach_execution_device_hook(block, device, skip_keys, preloaded, tied_params_map)


def _attach_as_one_block(
    module: Module,
    execution_device: AnyDevice | None,
    offload: bool,
    weights_map: Mapping[str, Any] | None,
    offload_buffers: bool,
    module_name: str,
    skip_keys: str | list[str] | None,
    preload_module_classes: Sequence[str] | None,
    tied_params_map: TiedMap | None,
) -> None:
    """Give a module that is on one device as a whole its hook, or its layers theirs."""
    if offload:
        attach_align_device_hook(
            module,
            execution_device,
            True,
            weights_map,
            offload_buffers,
            module_name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )
        return
    hook = AlignDevicesHook(
        execution_device,
        io_same_device=True,
        place_submodules=True,
        skip_keys=skip_keys,
        tied_params_map=tied_params_map,
    )
    add_hook_to_module(module, hook, append=True)


def _by_block(
    devices: AnyDevice | Mapping[str, AnyDevice] | None, offloads: bool | Mapping[str, bool]
) -> tuple[dict[str, AnyDevice | None], dict[str, bool]]:
    """Devices and offloading by name of block, where one of them is given for all."""
    if isinstance(devices, Mapping):
        by_block = offloads if isinstance(offloads, Mapping) else dict.fromkeys(devices, offloads)
        return dict(devices), dict(by_block)
    assert isinstance(offloads, Mapping)
    return dict.fromkeys(offloads, devices), dict(offloads)
