"""What a training loop asks of a strategy, as it is on one device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.errors import ConfigError
from notebook_accel.private import of_torch
from notebook_accel.training.models import has_parts, weights_of
from notebook_accel.training.precision.loss_scaling import LossScaling
from notebook_accel.training.processes.topology import Topology
from notebook_accel.training.stepping.step_timer import step_timer
from notebook_accel.training.strategies.strategy_request import LossFunction, call_model


class _SpreadScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for optimizers with plain gradients, sharded gradients, or both."""


def _unscale(
    as_torch: Callable[..., Any], optimizer: Optimizer, found_inf: torch.Tensor
) -> dict[torch.device, torch.Tensor]:
    if not has_parts(weights_of(optimizer)):
        found: dict[torch.device, torch.Tensor] = as_torch(optimizer)
        return found
    from notebook_accel.training.strategies import dtensors

    return dtensors.unscale_in_parts(as_torch, optimizer, found_inf)


of_torch.unscale_by(_SpreadScaler, _unscale)


class _SpreadScaling(LossScaling):
    kind_of_scaler = _SpreadScaler


class ForTrainingLoops:
    """Backward, clipping and loss scaling of a :class:`Strategy`.

    Attributes:
        scaling: None if losses are not scaled, or if the library scales them (DeepSpeed).
    """

    kind_of_scaling: type[LossScaling] = _SpreadScaling
    scaling: LossScaling | None
    topology: Topology
    spread: weakref.WeakSet[Module]
    """Prepared models of which this rank has only a part of the weights."""

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        if num_steps > 1:
            loss = loss / num_steps
        if self.scaling is not None:
            loss = self.scaling.scale(loss)
        with step_timer().backward(loss):
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def forward_backward(
        self, model: Module, inputs: Any, targets: Any, loss_function: LossFunction, num_steps: int
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
        weights = list(parameters)
        if not has_parts(weights):
            return torch.nn.utils.clip_grad_norm_(weights, max_norm, norm_type=norm_type)
        from notebook_accel.training.strategies import dtensors

        return dtensors.clip_grad_norm(weights, max_norm, norm_type, self.topology.device)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of the gradients to [-clip_value, clip_value], in place."""
        weights = list(parameters)
        groups = [weights]
        if has_parts(weights):
            from notebook_accel.training.strategies import dtensors

            groups = dtensors.by_mesh(weights)
        for group in groups:
            torch.nn.utils.clip_grad_value_(group, clip_value)

    def drop_unreduced(self, optimizer: Optimizer) -> None:
        """Drop accumulated gradients that are not yet in the weights' ``grad``."""
        # Asked by every zero_grad: all weights are looked at only where there is something to drop.
        if not self.spread or not has_parts(weights_of(optimizer)):
            return
        from notebook_accel.training.strategies import dtensors

        weights = {id(weight) for weight in weights_of(optimizer)}
        for model in self.spread:
            dtensors.drop_unreduced(model, weights)

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
