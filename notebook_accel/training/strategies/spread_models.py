"""Support for models in DDP wrappers or with sharded weights, made by ``prepare`` or by the user.

A user may pass ``prepare`` a ``DistributedDataParallel``, a ``DataParallel`` or a model on which
``fully_shard`` or ``parallelize_module`` was called. Such a model is not wrapped again. Gradient
accumulation, gradient norms and checkpoints need the same code for it as for a model that
``prepare`` wrapped or sharded: that code is here, and other strategies inherit it.

Importing ``DTensor`` takes a second. Ranks without sharded weights need not wait for it, since this
module only looks in ``sys.modules`` whether other code has imported it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from notebook_accel.private import of_torch
from notebook_accel.training.models import weights_of
from notebook_accel.training.precision.loss_scaling import LossScaling
from notebook_accel.training.strategies.base import Strategy
from notebook_accel.training.strategies.strategy_request import ModelToPrepare, Request


def has_parts(tensors: Iterable[Any]) -> bool:
    """Return whether any of the tensors is a ``DTensor``, of which this rank has only a part."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and any(isinstance(value, loaded.DTensor) for value in tensors)


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


class TakesSpreadModels(Strategy):
    """Base class of strategies that also accept models which the user has wrapped or sharded."""

    kind_of_scaling: type[LossScaling] = _SpreadScaling

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._was_given_parts = False
        self._in_parts: weakref.WeakSet[Module] = weakref.WeakSet()
        # Whether backward reduces the gradients of a sharded model; it does where nothing was set.
        self._reduces: weakref.WeakKeyDictionary[Module, bool] = weakref.WeakKeyDictionary()

    @property
    def saves_together(self) -> bool:
        return super().saves_together or self._was_given_parts

    def prepare_model(self, given: ModelToPrepare) -> Module:
        if has_parts(given.model.parameters()):
            from notebook_accel.training.strategies import dtensors

            self._was_given_parts = True
            self._in_parts.add(given.model)
            dtensors.accept_whole_weights(given.model)
            return given.model
        return super().prepare_model(given)

    def is_in_parts(self, model: Module) -> bool:
        # Not by its weights: while a forward runs, those of a sharded module are whole.
        return model in self._in_parts

    def gradient_sync(self, model: Module, enabled: bool) -> AbstractContextManager[Any]:
        inner = of_torch.original_module(model)
        if isinstance(inner, DistributedDataParallel):
            return _resumed(inner) if enabled else inner.no_sync()
        if hasattr(inner, "set_requires_gradient_sync"):  # after fully_shard
            return self._reducing(inner, enabled)
        return super().gradient_sync(model, enabled)

    @contextmanager
    def _reducing(self, model: Any, enabled: bool) -> Iterator[None]:
        """Turn gradient reduction in a sharded model's backward on or off in a ``with`` block."""
        before = self._reduces.get(model, True)
        self._set_reducing(model, enabled)
        try:
            yield
        finally:
            self._set_reducing(model, before)

    def _set_reducing(self, model: Any, enabled: bool) -> None:
        if self._reduces.get(model, True) != enabled:  # to set it, torch walks over every module
            model.set_requires_gradient_sync(enabled)
            self._reduces[model] = enabled

    def drop_unreduced(self, optimizer: Optimizer) -> None:
        # Asked by every zero_grad: all weights are looked at only where there is something to drop.
        if not self._in_parts or not has_parts(weights_of(optimizer)):
            return
        from notebook_accel.training.strategies import dtensors

        weights = {id(weight) for weight in weights_of(optimizer)}
        for model in self._in_parts:
            dtensors.drop_unreduced(model, weights)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        weights = list(parameters)
        if not has_parts(weights):
            return super().clip_grad_norm(weights, max_norm, norm_type)
        from notebook_accel.training.strategies import dtensors

        return dtensors.clip_grad_norm(weights, max_norm, norm_type, self.topology.device)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        weights = list(parameters)
        if not has_parts(weights):
            return super().clip_grad_value(weights, clip_value)
        from notebook_accel.training.strategies import dtensors

        for group in dtensors.by_mesh(weights):
            super().clip_grad_value(group, clip_value)
        return None

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        if not full or not has_parts(model.parameters()):
            return super().state_dict(model, full=full, keeps=keeps)
        from notebook_accel.training.strategies import dtensors

        return dtensors.whole_state_dict(model, keeps=keeps, to_cpu=True)

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        if not has_parts(weights_of(optimizer)):
            return super().optimizer_state(optimizer, keeps=keeps)
        from notebook_accel.training.strategies import dtensors

        whole = dtensors.make_whole(optimizer.state_dict(), keeps=keeps, to_cpu=True)
        return whole if keeps else {}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if not has_parts(weights_of(optimizer)):
            return super().load_optimizer_state(optimizer, state)
        from notebook_accel.training.strategies import dtensors

        return dtensors.load_optimizer_state(optimizer, state)

    def make_whole(self, values: Any) -> Any:
        if not self.saves_together:
            return values
        from notebook_accel.training.strategies import dtensors

        return dtensors.make_whole(values, to_cpu=True)


@contextmanager
def _resumed(model: DistributedDataParallel) -> Iterator[None]:
    """Let backward inside a ``with`` block exchange gradients after a forward in ``no_sync``."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    # The forward under no_sync left the reducer unprepared for an exchange.
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
