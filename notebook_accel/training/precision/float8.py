"""Linear layers that multiply in 8 bits, by torchao; all other operations compute in bfloat16.

Weights, gradients and optimizer steps stay in the type of the model. For each product a layer
rounds its inputs, its weight and the gradients of its outputs to 8 bits, with one scale per tensor.
So conversion keeps a model's weights and their names, and an optimizer that holds them stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from notebook_accel.errors import ConfigError
from notebook_accel.training.processes import devices
from notebook_accel.training.settings.environment import is_installed, read_flag
from notebook_accel.training.settings.handlers import KwargsHandler

# torch's product of 8-bit numbers takes no other sizes.
_DIVISOR = 16
_LEAST_CAPABILITY = (8, 9)


def require_torchao(asked: str) -> None:
    """Raise if torchao is not installed."""
    if not is_installed("torchao"):
        raise ConfigError(
            f"{asked} computes in 8 bits by torchao, which is not installed: use "
            'mixed_precision="bf16", or pip install torchao'
        )


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Settings of ``mixed_precision="fp8"``, for ``kwargs_handlers``: how torchao converts layers.

    Raises:
        ConfigError: torchao is not installed, or ``enable_fsdp_float8_all_gather`` is True, which
            is not supported.
    """

    config: Any = None
    """A ``torchao.float8.Float8LinearConfig``; None makes one. With ``emulate=True`` it computes on
    every device, slower than in full precision, to try what 8 bits do to a training."""
    module_filter_func: Callable[[Module, str], bool] | None = None
    """Called with a layer and its name: whether it is converted. None takes all linear layers whose
    sizes are multiples of 16, but the first and the last, which a training needs in more bits."""
    pad_inner_dim: bool | None = None
    """Pad the inner dimension of products to what the device takes. Variable
    ACCELERATE_FP8_PAD_INNER_DIM, else True."""
    enable_fsdp_float8_all_gather: bool | None = None
    """Gather sharded weights in 8 bits: not there yet. Its variable, which Accelerate's launcher
    sets to true unless told otherwise, is without effect."""

    def __post_init__(self) -> None:
        require_torchao("AORecipeKwargs")
        if self.config is None:
            from torchao.float8 import Float8LinearConfig

            if self.pad_inner_dim is None:
                self.pad_inner_dim = read_flag("FP8_PAD_INNER_DIM", default=True)
            self.config = Float8LinearConfig(pad_inner_dim=self.pad_inner_dim)
        if self.enable_fsdp_float8_all_gather or self.config.enable_fsdp_float8_all_gather:
            raise ConfigError(
                "enable_fsdp_float8_all_gather=True is not supported: it puts weights of another "
                "kind into the model. Leave it out: sharded weights are gathered in bfloat16, and "
                "multiplied in 8 bits"
            )

    def check_device(self, device: torch.device) -> None:
        """Raise if a device cannot multiply in 8 bits, unless ``config.emulate`` is True."""
        if self.config.emulate:
            return
        capability = devices.cuda_capability(device)
        if capability is None or capability < _LEAST_CAPABILITY:
            found = "" if capability is None else f" (compute capability {capability})"
            raise ConfigError(
                f'mixed_precision="fp8" on {device}{found}: 8-bit products need an NVIDIA GPU of '
                'compute capability 8.9 or higher (Ada, Hopper); use mixed_precision="bf16", or '
                "emulate them: kwargs_handlers=[AORecipeKwargs(config=Float8LinearConfig("
                "emulate=True))]"
            )


def convert_model_to_fp8_ao(
    model: Module,
    config: Any = None,
    module_filter_func: Callable[[Module, str], bool] | None = None,
) -> None:
    """Convert linear layers of a model in place, so that they multiply in 8 bits.

    Their weights stay the same. Layers that are converted already are left as they are.

    Args:
        model: the model.
        config: a ``torchao.float8.Float8LinearConfig``; None takes torchao's default.
        module_filter_func: called with a layer and its name; returns whether to convert it. None
            takes all linear layers whose sizes are multiples of 16, except the model's first and
            last linear layer.

    Raises:
        ConfigError: torchao is not installed.
    """
    require_torchao("convert_model_to_fp8_ao()")
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    ends = find_first_last_linear_layers(model)

    def is_chosen(module: Module, name: str) -> bool:
        if isinstance(module, Float8Linear):
            return False
        if module_filter_func is not None:
            return module_filter_func(module, name)
        return filter_linear_layers(module, name, ends)

    convert_to_float8_training(model, module_filter_fn=is_chosen, config=config)


def find_first_last_linear_layers(model: Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layer; (None, None) if it has none.

    Args:
        model: the model.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import find_first_last_linear_layers
        >>> layers = [torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)]
        >>> model = torch.nn.Sequential(*layers)
        >>> find_first_last_linear_layers(model)
        ('0', '2')
    """
    linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    return (linear[0], linear[-1]) if linear else (None, None)


def filter_linear_layers(
    module: Module, fqn: str, layers_to_filter: Collection[str | None]
) -> bool:
    """Return whether a linear layer is to be converted to 8-bit products; torchao calls this.

    A linear layer is converted if both of its sizes are multiples of 16, which the product of 8-bit
    numbers needs, and its name is not in ``layers_to_filter``.

    Args:
        module: the layer.
        fqn: the layer's full name in the model.
        layers_to_filter: names of layers that are not converted.
    """
    if isinstance(module, torch.nn.Linear) and (
        module.in_features % _DIVISOR or module.out_features % _DIVISOR
    ):
        return False
    return fqn not in layers_to_filter
