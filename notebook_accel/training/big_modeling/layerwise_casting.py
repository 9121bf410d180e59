"""Layers stored in a small type (float8) and computed in a larger one, one layer at a time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from notebook_accel.training.big_modeling.hooks import ModelHook, add_hook_to_module

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

__all__ = [
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "LayerwiseCastingHook",
    "attach_layerwise_casting_hooks",
]

# Layers whose forward uses no weights but their own, through the module itself.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class LayerwiseCastingHook(ModelHook):
    """Keeps a layer's weights in one type, and in another while its forward runs.

    Args:
        storage_dtype: the type between forwards.
        compute_dtype: the type during one.
        non_blocking: don't wait for the casts.
    """

    def __init__(
        self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool
    ) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: Module) -> Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(
        self, module: Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the linear and convolution layers of a model in a small type, for inference.

    Args:
        module: is changed.
        storage_dtype: the type of weights between forwards, such as ``torch.float8_e4m3fn``.
        compute_dtype: the type during a forward.
        skip_modules_pattern: regular expressions; a module whose name one of them finds
            something in stays as it is, with all inside (norms, embeddings).
        skip_modules_classes: a module of one of them stays as it is, with all inside.
        non_blocking: don't wait for the casts.
    """
    patterns = skip_modules_pattern or ()
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    skipped: list[str] = []
    for name, layer in module.named_modules():
        if any(name.startswith(f"{parent}.") or not parent for parent in skipped):
            continue
        if isinstance(layer, skip_modules_classes or ()) or any(
            re.search(pattern, name) for pattern in patterns
        ):
            skipped.append(name)
        elif isinstance(layer, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(layer, hook, append=True)
