"""The precisions in which models compute, full or mixed: a class for each, and a table of names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training.collectives.nested import convert_to_fp32
from notebook_accel.training.models import RemovableForward, strip_forward
from notebook_accel.training.precision.float8 import AORecipeKwargs, convert_model_to_fp8_ao
from notebook_accel.training.precision.loss_scaling import LossScaling
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.handlers import (
    AutocastKwargs,
    GradScalerKwargs,
    KwargsHandler,
    pick_handler,
)


@dataclass(eq=False, repr=False)
class AutocastForward(RemovableForward):
    """Runs a module's forward under autocast, and converts the outputs to float32."""

    autocast: Callable[[], AbstractContextManager[Any, bool | None]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            outputs = self.plain(*args, **kwargs)
        return convert_to_fp32(outputs)


class Precision:
    """Full precision, and the base class of the mixed precisions.

    An ``Accelerator`` makes one object, of a class in ``PRECISIONS``.

    Attributes:
        dtype: the type to which autocast casts operations; None for full precision.
    """

    name: ClassVar[str] = "no"
    dtype: ClassVar[torch.dtype | None] = None
    converts_layers: ClassVar[bool] = False
    """Whether a model gets layers of another class, which need to be whole."""
    recipe: AORecipeKwargs | None = None
    """How layers are converted; None where they are not."""
    is_on = True
    """Whether operations are cast to it at all; the user may turn that off (``native_amp``)."""

    def __init__(self, device: torch.device, handlers: Sequence[KwargsHandler]) -> None:
        self.device_type = device.type
        self.options = pick_handler(handlers, AutocastKwargs)
        self.scaler_options = pick_handler(handlers, GradScalerKwargs)

    def make_scaling(self, kind: type[LossScaling]) -> LossScaling | None:
        """Return a loss scaling, an object of ``kind``; None if this precision needs none."""
        return None

    def autocast(
        self, options: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any, bool | None]:
        """Return a context in which operations compute in this precision.

        Args:
            options: settings of ``torch.autocast``; None takes those of the ``Accelerator``.
        """
        if self.dtype is None or not self.is_on:
            return nullcontext()
        chosen = options or self.options
        return torch.autocast(
            self.device_type, self.dtype, chosen.enabled, cache_enabled=chosen.cache_enabled
        )

    def wrap(self, model: torch.nn.Module) -> None:
        """Make the model's forward compute in this precision, in place.

        In a mixed precision the model's outputs are still float32. Subclasses may also convert
        layers.
        """
        strip_forward(model, AutocastForward)
        if self.dtype is not None:
            model.__dict__["forward"] = AutocastForward(model, self.autocast)


class BFloat16(Precision):
    """Mixed precision in bfloat16; it has float32's range, so that it needs no loss scaling."""

    name = "bf16"
    dtype = torch.bfloat16


class Float16(Precision):
    """Mixed precision in float16; small gradients would become 0 in it, so the loss is scaled."""

    name = "fp16"
    dtype = torch.float16

    def make_scaling(self, kind: type[LossScaling]) -> LossScaling | None:
        if not self.scaler_options.enabled:
            return None
        return kind(kind.kind_of_scaler(self.device_type, **self.scaler_options.to_kwargs()))


class Float8(BFloat16):
    """Mixed precision whose linear layers multiply in 8 bits, by torchao; the rest is bfloat16."""

    name = "fp8"
    converts_layers = True

    def __init__(self, device: torch.device, handlers: Sequence[KwargsHandler]) -> None:
        super().__init__(device, handlers)
        self.recipe: AORecipeKwargs = pick_handler(handlers, AORecipeKwargs)
        self.recipe.check_device(device)

    def wrap(self, model: torch.nn.Module) -> None:
        convert_model_to_fp8_ao(model, self.recipe.config, self.recipe.module_filter_func)
        super().wrap(model)


PRECISIONS: dict[str, type[Precision]] = {
    kind.name: kind for kind in (Precision, BFloat16, Float16, Float8)
}


def resolve_precision(asked: str | None) -> str:
    """Return the name of the precision to use.

    Args:
        asked: the user's argument. None takes the variable ACCELERATE_MIXED_PRECISION; if that is
            unset, the precision is "no" (full precision).
    """
    given = asked if asked is not None else environment.read("MIXED_PRECISION") or "no"
    name = str(given).lower()
    if name not in PRECISIONS:
        source = "argument" if asked is not None else "environment"
        raise ConfigError(
            f"mixed_precision={given!r} (from the {source}): expected one of "
            f"{', '.join(map(repr, PRECISIONS))}"
        )
    return name


def refuse_divided_layers(name: str) -> None:
    """Raise if a precision needs whole layers.

    It is called if a rank may hold only a part of a layer: for tensor parallelism and DeepSpeed.
    """
    if PRECISIONS[name].converts_layers:
        raise ConfigError(
            f"mixed_precision={name!r} converts whole linear layers, and was asked for with tensor "
            "parallelism or DeepSpeed, which divide or keep them their own way: use "
            'mixed_precision="bf16", or DDP, FSDP or a pipeline'
        )
