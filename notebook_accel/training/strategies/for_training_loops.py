"""What a training loop asks of a strategy, as it is on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.errors import ConfigError
from notebook_accel.training.precision.loss_scaling import LossScaling
from notebook_accel.training.stepping.step_timer import step_timer
from notebook_accel.training.strategies.strategy_request import call_model


class ForTrainingLoops:
    """Backward, clipping and loss scaling of a :class:`Strategy`.

    Attributes:
        scaling: None if losses are not scaled, or if the library scales them (DeepSpeed).
    """

    kind_of_scaling: type[LossScaling] = LossScaling
    scaling: LossScaling | None

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        if num_steps > 1:
            loss = loss / num_steps
        if self.scaling is not None:
            loss = self.scaling.scale(loss)
        with step_timer().backward(loss):
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def forward_backward(
        self,
        model: Module,
        inputs: Any,
        targets: Any,
        loss_function: Callable[[Any, Any], torch.Tensor],
        num_steps: int = 1,
    ) -> torch.Tensor:
        """Run forward, loss and backward of one batch; return the loss, detached."""
        loss = loss_function(call_model(model, inputs), targets)
        self.backward(loss, num_steps)
        return loss.detach()

    def divide_sequences(
        self,
        buffers: Sequence[torch.Tensor],
        seq_dims: Sequence[int],
        no_restore: set[torch.Tensor],
    ) -> AbstractContextManager[Any]:
        """Return a context manager in which tensors hold this rank's part of their sequences."""
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the norm of the gradients, in place; return the norm before clipping.

        If weights are sharded, the norm is that over all shards, and all ranks call this together.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of the gradients to [-clip_value, clip_value], in place."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def drop_unreduced(self, optimizer: Optimizer) -> None:
        """Drop accumulated gradients that are not yet in the weights' ``grad``."""

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale losses with another ``GradScaler`` from now on; None turns loss scaling off."""
        kind = self.kind_of_scaling
        if scaler is not None and not isinstance(scaler, kind.kind_to_set):
            raise ConfigError(
                f"accelerator.scaler is set to a {type(scaler).__name__}: expected None or a "
                f"{kind.kind_to_set.__name__}, which the Accelerator has made: set it up by "
                "kwargs_handlers=[GradScalerKwargs(...)]"
            )
        # The property brings the scaler up to date with the last step first.
        before = None if self.scaling is None else self.scaling.scaler
        if scaler is not before:
            self.scaling = None if scaler is None else kind(scaler)
