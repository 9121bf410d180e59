"""What is inside a model, or another object: its modules in order, attributes by path, its kind."""

from __future__ import annotations

import sys
from functools import reduce
from typing import TYPE_CHECKING, Any

from notebook_accel.training.prepare import without_wrappers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module

__all__ = [
    "fsdp2_canonicalize_names",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_module_class_from_name",
    "get_pretty_name",
    "has_transformer_engine_layers",
    "is_peft_model",
    "model_has_dtensor",
    "recursive_getattr",
]


def has_transformer_engine_layers(model: Module) -> bool:
    """Whether a layer of the model is NVIDIA's Transformer Engine's; that need not be installed."""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    return any(kind.__module__.split(".")[0] == "transformer_engine" for kind in kinds)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """The attribute at a path: ``recursive_getattr(model, "encoder.layer")``."""
    return reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function, or that of the class of another object."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def get_module_children_bottom_up(model: Module, return_fqns: bool = False) -> list[Any]:
    """The modules of a model, each after all those inside it; the model itself is the last.

    Args:
        model: the model.
        return_fqns: give ``(name, module)`` for each, the model's name being "".
    """
    ordered: list[tuple[str, Module]] = []
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        ordered.append((path, module))
        for name, child in module.named_children():
            waiting.append((f"{path}.{name}" if path else name, child))
    ordered.reverse()
    return list(ordered) if return_fqns else [module for _, module in ordered]


def get_module_class_from_name(module: Module, name: str) -> type[Module] | None:
    """The class of this name among those of a model and the modules inside; None for none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def model_has_dtensor(model: Module) -> bool:
    """Whether weights of the model are in parts over a device mesh."""
    # Who has made one has imported the class; asking torch for it would import it (a second).
    parts: Any = sys.modules.get("torch.distributed.tensor")
    return parts is not None and any(isinstance(one, parts.DTensor) for one in model.parameters())


def get_model_tp_size(model: Module) -> int | None:
    """Over how many ranks Transformers divided the layers of a model; None for none.

    Older versions note it on the model, newer ones (5) in its configuration.
    """
    found = getattr(model, "tp_size", None)
    if found is not None:
        return int(found)
    noted = getattr(getattr(model, "config", None), "distributed_config", None)
    size = noted.get("tp_size") if isinstance(noted, dict) else getattr(noted, "tp_size", None)
    return None if size is None else int(size)


def is_peft_model(model: Module) -> bool:
    """Whether the model, as ``prepare`` gave it or before, is one of PEFT's."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(without_wrappers(model), peft.PeftModel)


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by the names that they have without activation checkpointing and compiling.

    Args:
        named_params: such as ``dict(model.named_parameters())``.
    """
    wrappers = {"_checkpoint_wrapped_module", "_orig_mod"}
    return {
        ".".join(part for part in name.split(".") if part not in wrappers): value
        for name, value in named_params.items()
    }
