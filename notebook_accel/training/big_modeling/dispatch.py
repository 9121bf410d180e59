"""Putting a model where a device map says, with hooks that make its forward work from there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from notebook_accel.errors import ConfigError
from notebook_accel.training.big_modeling.align_devices import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    has_offloaded_params,
    offloaded_values,
)
from notebook_accel.training.big_modeling.device_map import check_device_map
from notebook_accel.training.big_modeling.hooks import add_hook_to_module
from notebook_accel.training.big_modeling.offload_store import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
)
from notebook_accel.training.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import torch
    from torch.nn import Module

    from notebook_accel.training.big_modeling.tensors import AnyDevice, TiedMap

__all__ = [
    "cpu_offload",
    "disk_offload",
    "dispatch_model",
    "get_state_dict_offloaded_model",
    "is_offloaded",
]

Folder = Union[str, "os.PathLike[str]"]
_log = logging.getLogger(__name__)


def cpu_offload(
    model: Module,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> Module:
    """Keep a model's weights in the host's memory, and bring in each layer's for its forward.

    Args:
        model: is changed, and returned.
        execution_device: where it computes; None takes that of its first parameter.
        offload_buffers: offload the buffers too.
        state_dict: the weights on the host; None copies those of the model.
        preload_module_classes: names of classes whose weights come in as a whole.

    Raises:
        ConfigError: the model has no parameters, and ``execution_device`` was not given.
    """
    if state_dict is None:
        state_dict = {name: value.to("cpu") for name, value in model.state_dict().items()}
    return _offload(model, execution_device, offload_buffers, state_dict, preload_module_classes)


def disk_offload(
    model: Module,
    offload_dir: Folder,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> Module:
    """Keep a model's weights in files, and bring in each layer's for its forward.

    Args:
        model: is changed, and returned.
        offload_dir: the folder; what an earlier call wrote there is used as it is.
        execution_device: where it computes; None takes that of its first parameter.
        offload_buffers: offload the buffers too.
        preload_module_classes: names of classes whose weights come in as a whole.

    Raises:
        ConfigError: the model has no parameters, and ``execution_device`` was not given.
        OSError: the folder cannot be written.
    """
    if not Path(offload_dir, "index.json").is_file():
        offload_state_dict(offload_dir, model.state_dict())
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload(model, execution_device, offload_buffers, weights, preload_module_classes)


def _offload(
    model: Module,
    device: torch.device | None,
    offload_buffers: bool,
    weights: Mapping[str, torch.Tensor],
    preload_module_classes: Sequence[str] | None,
) -> Module:
    if device is None:
        first = next(model.parameters(), None)
        if first is None:
            raise ConfigError(
                f"{type(model).__name__} has no parameters, which would say where it computes: "
                "pass execution_device="
            )
        device = first.device
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )
    return model


def dispatch_model(
    model: Module,
    device_map: Mapping[str, AnyDevice],
    main_device: AnyDevice | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> Module:
    """Put a model where a device map says; what is on "cpu" or "disk" comes in for its forward.

    Args:
        model: is changed, and returned; its ``hf_device_map`` is the map.
        device_map: device by name of module, as ``infer_auto_device_map`` gives it.
        main_device: where offloaded modules compute; None takes the first that is neither "cpu"
            nor "disk".
        state_dict: the weights of what is on the host; None copies those of the model.
        offload_dir: folder for what is on disk; what an earlier call wrote there is used.
        offload_index: where the weights of what is on disk are, instead of files in a folder.
        offload_buffers: offload the buffers too.
        skip_keys: keyword arguments, and keys of outputs, that stay where they are.
        preload_module_classes: names of classes whose weights come in as a whole.
        force_hooks: attach hooks even where all is on one device.

    Raises:
        ConfigError: the map leaves out weights, or something is on disk and there is no folder.
    """
    check_device_map(model, device_map)
    if not _needs_hooks(model, device_map, force_hooks):
        model.to(next(iter(device_map.values())))
        model.__dict__["hf_device_map"] = dict(device_map)
        return model
    main = _main_device(device_map) if main_device is None else main_device
    offloaded = ("disk",) if str(main) in ("cpu", "mps") else ("cpu", "disk")
    ties = find_tied_parameters(model)
    if check_tied_parameters_in_config(model) or ties:
        check_tied_parameters_on_same_device(ties, device_map)
    devices = {name: main if on in ("cpu", "disk") else on for name, on in device_map.items()}
    weights = _weights_map(model, device_map, main, state_dict, offload_dir, offload_index)
    tied = [model.get_parameter(name) for group in ties for name in group]
    # Meta tensors all have the address 0: they would make each other tied.
    tied_map: TiedMap = {weight.data_ptr(): {} for weight in tied if not weight.is_meta}
    attach_align_device_hook_on_blocks(
        model,
        {**devices, "": main},
        {name: device in offloaded for name, device in device_map.items()},
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=tied_map,
    )
    away = [str(device) for device in device_map.values() if device in offloaded]
    if away:
        _log.warning("weights are on the meta device between forwards: %s", sorted(set(away)))
        _refuse_moves(model)
    retie_parameters(model, ties)
    model.__dict__["hf_device_map"] = dict(device_map)
    return model


def _needs_hooks(model: Module, device_map: Mapping[str, AnyDevice], force: bool) -> bool:
    devices = {str(device) for device in device_map.values()}
    is_quantised = getattr(model, "is_quantized", False) or getattr(
        model, "is_loaded_in_8bit", False
    )
    return force or len(devices) > 1 or devices == {"disk"} or bool(is_quantised)


def _main_device(device_map: Mapping[str, AnyDevice]) -> AnyDevice:
    computing = (device for device in device_map.values() if device not in ("cpu", "disk"))
    return next(computing, "cpu")


def _weights_map(
    model: Module,
    device_map: Mapping[str, AnyDevice],
    main: AnyDevice,
    state_dict: Mapping[str, torch.Tensor] | None,
    folder: Folder | None,
    index: Mapping[str, Any] | None,
) -> OffloadedWeightsLoader | None:
    """The weights of what is offloaded; what is on disk is written first where it is not there."""
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if on_disk and folder is None and index is None:
        raise ConfigError(
            f"the device map puts {on_disk} on disk: pass the folder for it as offload_dir"
        )
    if state_dict is None and str(main) != "cpu":
        on_host = [name for name, device in device_map.items() if device == "cpu"]
        state_dict = _named(model, on_host)
    if on_disk and index is None and folder is not None:
        if not Path(folder, "index.json").is_file():
            offload_state_dict(folder, _named(model, on_disk))
    else:
        folder = folder if index is not None or on_disk else None
    if state_dict is None and folder is None and index is None:
        return None
    device = main if index is not None else None
    return OffloadedWeightsLoader(state_dict, folder, index, device)


def _named(model: Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The weights of some modules; ``""`` names them all."""
    state = model.state_dict()
    return state if "" in names else extract_submodules_state_dict(state, names)


def _refuse_moves(model: Module) -> None:
    """Let ``model.to(device)`` and its like fail while weights are on the meta device."""
    for name in ("to", "cuda", "cpu", "xpu", "npu", "mlu", "sdaa", "musa"):
        if hasattr(model, name):
            model.__dict__[name] = _Move(model, name)


class _Move:
    """A method that moves a model, unless weights of it are on the meta device."""

    def __init__(self, model: Module, name: str) -> None:
        self.model = model
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Module:
        if any(weight.is_meta for weight in self.model.parameters()):
            raise RuntimeError(
                "this model has weights on the host or on disk, and cannot be moved: load it with "
                "another device_map, or without one"
            )
        moved: Module = getattr(type(self.model), self.name)(self.model, *args, **kwargs)
        return moved


def is_offloaded(model: Module) -> bool:
    """Whether weights of a model are kept elsewhere, and brought in for each forward."""
    return any(has_offloaded_params(module) for module in model.modules())


def get_state_dict_offloaded_model(model: Module) -> dict[str, torch.Tensor]:
    """The state dict of a model, on the host, with the values of what is offloaded."""
    state: dict[str, torch.Tensor] = model.state_dict()
    values = offloaded_values(model)
    return {name: values.get(name, value).to("cpu") for name, value in state.items()}
