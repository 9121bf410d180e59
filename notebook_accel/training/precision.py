"""In which numbers a model computes: one class a precision, and the one table of their names."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training import environment
from notebook_accel.training.loss_scaling import LossScaling
from notebook_accel.training.models import AutocastForward, strip_forward

if TYPE_CHECKING:
    from notebook_accel.training.settings import AutocastKwargs, GradScalerKwargs

__all__ = ["BFloat16", "Float16", "Precision", "make_precision", "resolve_precision"]


class Precision:
    """Full precision: what a class that overrides nothing means."""

    name: ClassVar[str] = "no"
    dtype: ClassVar[torch.dtype | None] = None

    def __init__(
        self, device: torch.device, *, autocast: AutocastKwargs, scaler: GradScalerKwargs
    ) -> None:
        self.device_type = device.type
        self.options = autocast
        self.scaler_options = scaler
        self.scaling = self.make_scaling(torch.amp.GradScaler)

    def make_scaling(self, kind: type[torch.amp.GradScaler]) -> LossScaling | None:
        """The loss scaling that goes with this precision, by a scaler of this class; None for
        none."""
        return None

    def autocast(
        self, options: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any, bool | None]:
        """A context in which operations compute in this precision."""
        if self.dtype is None:
            return nullcontext()
        options = options or self.options
        return torch.autocast(
            self.device_type,
            dtype=self.dtype,
            enabled=options.enabled,
            cache_enabled=options.cache_enabled,
        )

    def wrap(self, model: torch.nn.Module) -> None:
        """Let the model's forward compute in this precision, in place; outputs are float32."""
        strip_forward(model)
        if self.dtype is not None:
            AutocastForward.install(model, self.autocast)


class BFloat16(Precision):
    """Float32's range in 16 bits: needs no loss scaling."""

    name = "bf16"
    dtype = torch.bfloat16


class Float16(Precision):
    """A narrow range in 16 bits: small gradients would vanish, so the loss is scaled."""

    name = "fp16"
    dtype = torch.float16

    def make_scaling(self, kind: type[torch.amp.GradScaler]) -> LossScaling | None:
        if not self.scaler_options.enabled:
            return None
        return LossScaling(kind(self.device_type, **self.scaler_options.to_kwargs()))


_PRECISIONS: dict[str, type[Precision]] = {
    kind.name: kind for kind in (Precision, BFloat16, Float16)
}


def resolve_precision(asked: str | None) -> str:
    """The name of the precision: as asked for, else as the environment says, else "no".

    Raises:
        ConfigError: there is no precision of that name.
    """
    given = asked if asked is not None else environment.read("MIXED_PRECISION") or "no"
    name = str(given).lower()
    if name not in _PRECISIONS:
        source = "argument" if asked is not None else "environment"
        raise ConfigError(
            f"mixed_precision={given!r} (from the {source}): expected one of "
            f"{', '.join(map(repr, _PRECISIONS))}"
        )
    return name


def make_precision(
    name: str, device: torch.device, *, autocast: AutocastKwargs, scaler: GradScalerKwargs
) -> Precision:
    """The precision of this name on this device."""
    return _PRECISIONS[name](device, autocast=autocast, scaler=scaler)
