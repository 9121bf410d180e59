"""Models whose linear layers are stored in 8 or 4 bits, by bitsandbytes.

The layers are replaced while the model has no weights yet; a weight is quantised on its way into
the parameter, when it reaches the device that computes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from notebook_accel.errors import ConfigError
from notebook_accel.training import availability, topology
from notebook_accel.training.big_modeling.device_map import device_of, is_below, is_in_any
from notebook_accel.training.big_modeling.dispatch import dispatch_model
from notebook_accel.training.big_modeling.dtypes import CustomDtype
from notebook_accel.training.big_modeling.empty_weights import init_empty_weights
from notebook_accel.training.big_modeling.inference import infer_auto_device_map
from notebook_accel.training.big_modeling.loading import load_checkpoint_in_model
from notebook_accel.training.big_modeling.memory_limits import get_balanced_memory
from notebook_accel.training.big_modeling.tensors import set_module_tensor_to_device
from notebook_accel.training.ties import find_tied_parameters, retie_parameters

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch.nn import Module

    from notebook_accel.training.big_modeling.memory_limits import MaxMemory
    from notebook_accel.training.big_modeling.tensors import AnyDevice

__all__ = ["BnbQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """How a model's linear layers are quantised.

    Raises:
        ConfigError: not one of ``load_in_8bit`` and ``load_in_4bit`` is True, or a field has a
            value that is not known.
    """

    load_in_8bit: bool = False
    """Eight bits a weight (LLM.int8)."""
    llm_int8_threshold: float = 6.0
    """Columns with larger activations than this stay in float16."""
    load_in_4bit: bool = False
    """Four bits a weight."""
    bnb_4bit_quant_type: str = "fp4"
    """"fp4" or "nf4"."""
    bnb_4bit_use_double_quant: bool = False
    """Whether the scales of four-bit weights are quantised too."""
    bnb_4bit_compute_dtype: Any = "fp16"
    """What four-bit layers compute in: "fp32", "fp16", "bf16" or a type of torch."""
    torch_dtype: Any = None
    """What the other layers are stored in, in the same words; None is float16."""
    skip_modules: list[str] | None = None
    """Names of modules that stay as they are; None takes the head."""
    keep_in_fp32_modules: list[str] | None = None
    """Names of modules that stay in float32."""

    def __post_init__(self) -> None:
        asked = (self.load_in_8bit, self.load_in_4bit)
        if not all(isinstance(each, bool) for each in asked) or sum(asked) != 1:
            raise ConfigError(
                f"BnbQuantizationConfig(load_in_8bit={self.load_in_8bit!r}, "
                f"load_in_4bit={self.load_in_4bit!r}): set one of the two to True"
            )
        if not isinstance(self.llm_int8_threshold, (int, float)):
            raise ConfigError(f"llm_int8_threshold={self.llm_int8_threshold!r}: expected a number")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigError(
                f'bnb_4bit_quant_type={self.bnb_4bit_quant_type!r}: expected "fp4" or "nf4"'
            )
        for name in ("skip_modules", "keep_in_fp32_modules"):
            if not isinstance(getattr(self, name), (list, type(None))):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a list of names")
        compute = self.bnb_4bit_compute_dtype
        self.bnb_4bit_compute_dtype = _as_dtype("bnb_4bit_compute_dtype", compute)
        self.torch_dtype = _as_dtype("torch_dtype", self.torch_dtype or "fp16")

    @property
    def target_dtype(self) -> torch.dtype | CustomDtype:
        """What a quantised weight weighs, for device maps."""
        return torch.int8 if self.load_in_8bit else CustomDtype.INT4


def _as_dtype(name: str, value: Any) -> torch.dtype:
    found = value if isinstance(value, torch.dtype) else _DTYPES.get(value)
    if found is None:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(_DTYPES)}")
    return found


def load_and_quantize_model(
    model: Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, AnyDevice] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> Module:
    """Replace the linear layers of a model by quantised ones, and load a checkpoint into it.

    Args:
        model: usually made under ``init_empty_weights``; is changed, and returned.
        bnb_quantization_config: how.
        weights_location: a checkpoint, as of ``load_checkpoint_in_model``; None quantises the
            weights that the model has.
        device_map: device by name of module, or how to infer it ("auto", "balanced",
            "balanced_low_0", "sequential"); None takes this rank's device for all. What is on
            "cpu" or "disk" beside an accelerator is not quantised.
        no_split_module_classes, max_memory: for a map that is inferred.
        offload_folder, offload_state_dict: as of ``load_checkpoint_in_model``.

    Raises:
        ImportError: bitsandbytes is not installed.
        ConfigError: the model has no weights, and there is no checkpoint.
    """
    if not availability.is_bnb_available():
        raise ImportError(
            "load_and_quantize_model needs bitsandbytes, which is not installed: "
            "pip install bitsandbytes"
        )
    config = bnb_quantization_config
    is_empty = any(weight.is_meta for weight in model.parameters())
    if is_empty and weights_location is None:
        raise ConfigError(
            "the model has no weights yet: pass the checkpoint's path as weights_location"
        )
    skipped = config.skip_modules
    skipped = _heads(model) if skipped is None else skipped
    spread = {"no_split_module_classes": no_split_module_classes, "max_memory": max_memory}
    devices = _device_map(model, config, device_map, skipped, spread)
    state = None if weights_location else model.state_dict()
    _replace_linears(model, config, [*skipped, *_offloaded(devices)])
    if state is not None:
        _quantize_weights(model, state, config, devices)
    elif weights_location is not None:
        load_checkpoint_in_model(
            model,
            weights_location,
            devices,
            offload_folder,
            config.torch_dtype,
            offload_state_dict,
            keep_in_fp32_modules=config.keep_in_fp32_modules,
        )
    setattr(model, "is_loaded_in_8bit" if config.load_in_8bit else "is_loaded_in_4bit", True)
    if len({str(device) for device in devices.values()}) > 1:
        return dispatch_model(model, devices, offload_dir=offload_folder)
    model.__dict__["hf_device_map"] = dict(devices)
    return model


def has_4bit_bnb_layers(model: Module) -> bool:
    """Whether a model has four-bit layers of bitsandbytes."""
    return any(
        type(module).__name__ == "Linear4bit" and type(module).__module__.startswith("bitsandbytes")
        for module in model.modules()
    )


def _heads(model: Module) -> list[str]:
    """What is not quantised unless asked for: the last module, and those of tied weights."""
    children = [name for name, _ in model.named_children()]
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    return [*children[-1:], *tied]


def _device_map(
    model: Module,
    config: BnbQuantizationConfig,
    device_map: str | Mapping[str, AnyDevice] | None,
    skipped: Sequence[str],
    spread: dict[str, Any],
) -> Mapping[str, AnyDevice]:
    if device_map is None:
        return {"": topology.topology().device}
    if not isinstance(device_map, str):
        return device_map
    special = {
        name: config.torch_dtype
        for name, _ in model.named_parameters()
        if any(is_below(name, parent) for parent in skipped)
    }
    spread = {**spread, "dtype": config.target_dtype, "special_dtypes": special}
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        spread["max_memory"] = get_balanced_memory(model, low_zero=low_zero, **spread)
    return infer_auto_device_map(model, **spread)


def _offloaded(devices: Mapping[str, AnyDevice]) -> list[str]:
    """The modules that an accelerator fetches for their forward, and that stay as they are."""
    away = [name for name, device in devices.items() if str(device) in ("cpu", "disk")]
    return away if len(away) < len(devices) or "disk" in devices.values() else []


def _replace_linears(model: Module, config: BnbQuantizationConfig, skipped: Sequence[str]) -> None:
    for name, module in list(model.named_modules()):
        is_skipped = any(is_below(name, parent) for parent in skipped)
        if isinstance(module, nn.Linear) and not is_skipped and name:
            owner, _, own_name = name.rpartition(".")
            with init_empty_weights():
                setattr(model.get_submodule(owner), own_name, _quantised_layer(module, config))


def _quantised_layer(layer: nn.Linear, config: BnbQuantizationConfig) -> Module:
    bnb: Any = importlib.import_module("bitsandbytes")
    size = (layer.in_features, layer.out_features, layer.bias is not None)
    if config.load_in_8bit:
        new = bnb.nn.Linear8bitLt(
            *size, has_fp16_weights=False, threshold=config.llm_int8_threshold
        )
    else:
        new = bnb.nn.Linear4bit(
            *size,
            config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )
    new.requires_grad_(False)
    quantised: Module = new
    return quantised


def _quantize_weights(
    model: Module,
    state: Mapping[str, torch.Tensor],
    config: BnbQuantizationConfig,
    devices: Mapping[str, AnyDevice],
) -> None:
    """Put the weights that a model had into its new layers."""
    in_fp32 = config.keep_in_fp32_modules or ()
    ties = find_tied_parameters(model)
    for name, value in state.items():
        device = device_of(name, devices)
        dtype = torch.float32 if is_in_any(name, in_fp32) else config.torch_dtype
        held_on = "cpu" if device == "disk" else device
        set_module_tensor_to_device(model, name, held_on, value, dtype)
    retie_parameters(model, ties)
