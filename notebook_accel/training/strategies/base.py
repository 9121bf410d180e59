"""``Strategy``: the interface of all kinds of parallelism, implemented here for a single device.

A new kind of parallelism is a subclass in a file of its own, which overrides what it does
differently, and one line in the table of ``strategies/__init__.py``. The rest of ``training`` calls
these methods and never checks which strategy it has::

    settings --table--> Strategy --prepare--> prepared models and optimizers
                           |--data_group--> loaders, gather, reduce
                           |--backward, clip_grad_*, gradient_sync, forward_backward
                           '--state_dict, optimizer_state --> checkpoints
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.models.compiling import compile_model
from notebook_accel.training.precision.loss_scaling import LossScaling
from notebook_accel.training.processes import devices, topology
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer
from notebook_accel.training.stepping.scheduler import AcceleratedScheduler
from notebook_accel.training.stepping.step_timer import measure_steps, step_timer
from notebook_accel.training.strategies.strategy_request import call_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from notebook_accel.training.files.pieces import Piece
    from notebook_accel.training.settings.handlers import DistributedType
    from notebook_accel.training.settings.parallelism import ParallelismConfig
    from notebook_accel.training.stepping.accumulation import Accumulation
    from notebook_accel.training.strategies.strategy_request import (
        ModelToPrepare,
        PrepareCall,
        Request,
    )


class Strategy:
    """Base class of the kinds of parallelism, and the strategy for a single device.

    Attributes:
        distributed_type: None if the value follows from the device and the number of ranks.
        scaling: None if losses are not scaled, or if the library scales them (DeepSpeed).
        label: what users call it, shown in the view of a run; "" for plain training.
        mesh: the device mesh of the ranks; None without ``parallelism_config`` or sharding.
    """

    distributed_type: DistributedType | None = None
    label = ""
    mesh: DeviceMesh | None = None
    spreads_weights: bool = False
    prepares_together: bool = False
    parallelism: ParallelismConfig | None = None
    kind_of_scaling: type[LossScaling] = LossScaling

    def __init__(self, request: Request) -> None:
        self.topology = request.topology
        self.precision = request.precision
        self.handlers = request.handlers
        self.dynamo = request.dynamo
        self.parallelism = request.plugins.get("parallelism_config")
        self.scaling = request.precision.make_scaling(self.kind_of_scaling)
        self.data_group = DataGroup.of_all_ranks(
            self.topology.num_processes, self.topology.process_index
        )
        measure_steps(self.topology.device)

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

    @property
    def saves_shards(self) -> bool:
        """Whether each rank writes its shards of the weights.

        If False, rank 0 writes full weights.
        """
        return False

    @property
    def saves_together(self) -> bool:
        """Whether all ranks must take part in saving, since each has only a part of a model."""
        return self.saves_shards or self.spreads_weights

    def prepare(self, call: PrepareCall) -> tuple[list[Module], list[Optimizer]]:
        """Return the prepared models and optimizers of one ``prepare`` call, in the same order.

        All ranks call it. The optimizers are torch's or DeepSpeed's own: :meth:`wrap_optimizer`
        wraps them in ``AcceleratedOptimizer`` afterwards.
        """
        for each in call.models:
            self.precision.wrap(each.model)
        return [self.prepare_model(each) for each in call.models], call.optimizers

    def prepare_model(self, given: ModelToPrepare) -> Module:
        """Return the model that the training loop calls.

        Moved, compiled, and wrapped or sharded.
        """
        return compile_model(self.place(given), self.dynamo)

    def renew(self, model: Module) -> bool:
        """Update a prepared model's wrapper in place.

        False if it must be prepared like a new model.
        """
        return True

    def place(self, given: ModelToPrepare) -> Module:
        """Return the model of ``given``, moved to ``given.device`` if that is not None."""
        if given.device is None:
            return given.model
        before = dict(given.model.named_parameters(remove_duplicate=False))
        model = given.model.to(given.device)
        # On some devices this makes new parameters, which an optimizer made before does not have.
        for name, new in [*model.named_parameters(remove_duplicate=False)]:
            if new is not before[name]:
                torch.utils.swap_tensors(before[name], new)  # type: ignore[no-untyped-call]
                module, _, own = name.rpartition(".")
                setattr(model.get_submodule(module), own, before[name])
        return model

    def wrap_optimizer(
        self, optimizer: Optimizer, accumulation: Accumulation, *, moves_state: bool
    ) -> AcceleratedOptimizer:
        return AcceleratedOptimizer(
            optimizer,
            moves_state,
            accumulation=accumulation,
            scaling=self.scaling,
            device_memory=devices.memory_reader(self.topology.device),
            drop_unreduced=self.drop_unreduced,
        )

    def wrap_scheduler(
        self, scheduler: LRScheduler, optimizers: list[AcceleratedOptimizer], **settings: Any
    ) -> AcceleratedScheduler:
        return AcceleratedScheduler(scheduler, optimizers, **settings)

    def gradient_sync(self, model: Module, enabled: bool) -> AbstractContextManager[Any]:
        """Return a context manager that turns the gradient exchange of backward on or off."""
        return nullcontext()

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

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        """Return the state dict of an unwrapped model; with sharded weights, all ranks call it.

        Args:
            full: whether sharded tensors are joined to full ones. False returns this rank's shards.
            keeps: False for a rank that only helps to join tensors for other ranks. Such a rank may
                get an empty dictionary, which saves memory.
        """
        return model.state_dict()

    def is_in_parts(self, model: Module) -> bool:
        """Return whether this rank has only a part of a prepared model's weights."""
        return False

    def own_state_dict(self, model: Module) -> dict[str, Any] | None:
        """Return this rank's part without a collective.

        None if the notebook could not join the parts.
        """
        return dict(model.state_dict())

    def load_state_dict(self, model: Module, state: dict[str, Any], *, strict: bool = True) -> None:
        """Load full (unsharded) weights into a model without wrapper; all ranks call it."""
        model.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        """Return the full state dict of an optimizer; with sharded weights, all ranks call it."""
        return optimizer.state_dict()

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return this rank's part without a collective, as :meth:`own_state_dict` does."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full (unsharded) state dict into an optimizer; all ranks call it."""
        optimizer.load_state_dict(state)

    def drop_unreduced(self, optimizer: Optimizer) -> None:
        """Drop accumulated gradients that are not yet in the weights' ``grad``."""

    def own_piece(self, options: dict[str, Any]) -> Piece | None:
        """Return the piece that the strategy's library writes itself.

        None if this package writes all.
        """
        return None

    def read_own(self, folder: Path, options: dict[str, Any], *, strict: bool) -> bool:
        """Load what :meth:`own_piece` wrote; False if the checkpoint has no such files."""
        return False

    def make_whole(self, values: Any) -> Any:
        """Return nested ``values`` with sharded tensors joined to full ones; all ranks call it."""
        return values

    def barrier(self) -> None:
        topology.barrier()

    def forget(self) -> None:
        """Release the prepared objects, so that others can be prepared in their place."""

    def close(self) -> None:
        """Release resources that the strategy made for itself, such as a process group."""
