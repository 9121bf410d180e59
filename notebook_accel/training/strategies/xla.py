"""Data parallelism on TPUs by torch_xla: each rank has the full model and averages gradients.

torch_xla records operations, and runs them as one graph at the end of a step. Gradients are
averaged over the ranks when they are first needed, by ``step`` or clipping, within that graph. This
holds for every optimizer that steps weights of a prepared model, even an unprepared optimizer, so
that the ranks cannot silently diverge.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.errors import ConfigError
from notebook_accel.training.collectives.nested import recursively_apply, send_to_device
from notebook_accel.training.models import (
    RemovableForward,
    joined_state_dict,
    replaced_forwards,
    weights_of,
)
from notebook_accel.training.processes import xla_driver
from notebook_accel.training.settings.handlers import DistributedType
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.stepping.around_steps import call_around_steps
from notebook_accel.training.strategies.base import ModelToPrepare, Request, Strategy

# Steps in a row that compiled, from which on the loop is told. The first compiles twice: the
# optimizer has its state from the second step on.
_COMPILED_STEPS = 8


class XlaParallel(Strategy):
    """Strategy for data parallelism on TPUs: chosen whenever the device is an XLA device."""

    distributed_type = DistributedType.XLA
    label = "XLA"

    def __init__(self, request: Request) -> None:
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as met

        super().__init__(request)
        for name in request.plugins:
            raise ConfigError(
                f"{name} was given, and torch_xla trains here with a whole model on each rank: "
                "sharding is there by SPMD alone, which excludes xmp.spawn. Leave the plugin out"
            )
        if self.scaling is not None:
            raise ConfigError(
                'mixed_precision="fp16" scales losses, which torch_xla does not support: use '
                '"bf16", which TPUs are made for'
            )
        self._xm: Any = xm
        self._metrics: Any = met
        # By number: ranks that are threads see each other's optimizers step.
        self._weights: dict[int, weakref.ref[torch.Tensor]] = {}
        self._averaged: set[int] = set()
        self._num_compiles = 0
        self._compiled_steps = 0
        call_around_steps(before=self._average_before, after=self._end_step_after)

    def place(self, given: ModelToPrepare) -> Module:
        if given.device is not None:
            super().place(given)
            if not any(isinstance(one, _MovingForward) for one in replaced_forwards(given.model)):
                given.model.__dict__["forward"] = _MovingForward(given.model, given.device)
        if self.topology.num_processes > 1:
            self._xm.broadcast_master_param(given.model)
        if given.training:
            self._weights |= {id(one): weakref.ref(one) for one in given.model.parameters()}
        return given.model

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        self._averaged.clear()
        super().backward(loss, num_steps, **kwargs)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        return super().clip_grad_norm(self._average(parameters), max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        super().clip_grad_value(self._average(parameters), clip_value)

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        return joined_state_dict(model, lambda _, value: _host_copy(value), keeps=True)

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        return _host_copy(optimizer.state_dict())  # type: ignore[no-any-return]

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        return self.optimizer_state(optimizer)

    def make_whole(self, values: Any) -> Any:
        return _host_copy(values)

    def _average(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Average gradients that were not averaged since the newest backward; all ranks call it."""
        weights = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        world_size = self.topology.num_processes
        own = [one for one in weights if self._is_own(one) and id(one) not in self._averaged]
        gradients: list[torch.Tensor] = []
        for one in own if world_size > 1 else ():
            if one.grad is not None:
                # A tensor that was changed in place before, as by the adding up of a window, has
                # its old values again at its next change in place: torch_xla does not tell
                # torch's functionalization of this one (seen in 2.9).
                one.grad = one.grad.detach().clone()
                gradients.append(one.grad)
        if gradients:
            self._xm.all_reduce("sum", gradients, scale=1.0 / world_size)
        self._averaged.update(map(id, own))
        return weights

    def _is_own(self, weight: torch.Tensor) -> bool:
        known = self._weights.get(id(weight))
        return known is not None and known() is weight

    def _average_before(self, optimizer: Optimizer) -> None:
        self._average(weights_of(optimizer))

    def _end_step_after(self, optimizer: Optimizer) -> None:
        if any(map(self._is_own, weights_of(optimizer))):
            self._end_step()

    def _end_step(self) -> None:
        self._averaged.clear()
        xla_driver.end_step()
        num_compiles = self._metrics.counter_value("UncachedCompile") or 0
        has_compiled = num_compiles > self._num_compiles
        self._num_compiles = num_compiles
        self._compiled_steps = self._compiled_steps + 1 if has_compiled else 0
        if self._compiled_steps == _COMPILED_STEPS:
            notice_once(
                "XLA compiles",
                f"XLA compiled anew in each of the last {_COMPILED_STEPS} steps ({num_compiles} "
                "compiles so far), which takes longer than to compute: give every batch the same "
                "shape (pad to one length, drop_last=True), and what changes in tensors",
            )


@dataclass(eq=False, repr=False)
class _MovingForward(RemovableForward):
    """Replaces a model's forward by one that moves inputs to the device, as DDP does on GPUs."""

    device: torch.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        moved_args, moved_kwargs = send_to_device((args, kwargs), self.device)
        return self.plain(*moved_args, **moved_kwargs)


def _host_copy(state: Any) -> Any:
    return recursively_apply(lambda tensor: tensor.detach().cpu(), state)
