"""What a kind of parallelism may do in its own way; each method here does it for a single device.

A new kind is a file with a class that overrides what it needs, and one line in the table of
``strategies/__init__.py``. The rest of ``training`` asks the strategy and never which it is::

    what the user asked --table--> Strategy --prepare--> models and optimizers as they are used
                                      |--data_group--> loaders, gather, reduce, dispatch
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
from notebook_accel.training.strategies.request import call_model

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
    from notebook_accel.training.strategies.request import ModelToPrepare, PrepareCall, Request

__all__ = ["Strategy"]


class Strategy:
    """One kind of parallelism: it spreads models over the ranks, trains and saves them.

    Attributes:
        distributed_type: what ``accelerator.distributed_type`` says; None for the topology's.
        topology: where this rank stands.
        precision: in which numbers models compute.
        handlers: the ``kwargs_handlers`` of the user.
        dynamo: how models are compiled.
        scaling: the loss scaling that this package does; None where none is needed, or where
            the strategy's library does it.
        kind_of_scaling: the class of ``scaling``.
        mesh: the ranks, arranged by the kinds of parallelism; None where they are just a row.
        spreads_weights: whether weights are in parts over the mesh.
        prepares_together: whether a model and its optimizer are made ready in one step, so that
            ``prepare_model`` and ``prepare_optimizer`` of an ``Accelerator`` cannot do it.
        parallelism: how many ranks each kind of parallelism has, where the user or the mesh says
            so.
        data_group: which ranks read different samples.
    """

    distributed_type: DistributedType | None = None
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
        self.scaling = request.precision.scaling
        self.data_group = DataGroup.of_all_ranks(
            self.topology.num_processes, self.topology.process_index
        )

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale losses by this from now on; by nothing where it is None.

        Raises:
            ConfigError: it does not go with how weights are spread.
        """
        kind = self.kind_of_scaling
        if scaler is not None and not isinstance(scaler, kind.kind_of_scaler):
            raise ConfigError(
                f"accelerator.scaler is set to a {type(scaler).__name__}: expected None or a "
                f"{kind.kind_of_scaler.__name__}, which the Accelerator has made: set it up by "
                "kwargs_handlers=[GradScalerKwargs(...)]"
            )
        # The property brings the scaler up to date with the last step first.
        before = None if self.scaling is None else self.scaling.scaler
        if scaler is not before:
            self.scaling = None if scaler is None else kind(scaler)

    @property
    def saves_shards(self) -> bool:
        """Whether each rank writes its part of a checkpoint's weights."""
        return False

    @property
    def saves_together(self) -> bool:
        """Whether all ranks have to take part in saving a model, because it is spread over them."""
        return self.saves_shards or self.spreads_weights

    def prepare(self, call: PrepareCall) -> tuple[list[Module], list[Optimizer]]:
        """Return the prepared models and optimizers of one call, in the same order."""
        for each in call.models:
            self.precision.wrap(each.model)
        return [self.prepare_model(each) for each in call.models], call.optimizers

    def prepare_model(self, given: ModelToPrepare) -> Module:
        """Return the model that the loop calls, without regard to precision."""
        return compile_model(self.place(given), self.dynamo)

    def renew(self, model: Module) -> bool:
        """Spread a model that was prepared before anew, in place, where other weights train now.

        Returns:
            whether it can stay; False: it has to be prepared as one that is new.
        """
        return True

    def place(self, given: ModelToPrepare) -> Module:
        """Move a model to the device where it computes, and return it."""
        return given.model if given.device is None else given.model.to(given.device)

    def wrap_optimizer(
        self, optimizer: Optimizer, accumulation: Accumulation, *, moves_state: bool
    ) -> AcceleratedOptimizer:
        """Return the optimizer that the loop steps; ``moves_state`` moves its state, too."""
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
        """Return the scheduler that the loop steps, an ``AcceleratedScheduler(**settings)``."""
        return AcceleratedScheduler(scheduler, optimizers, **settings)

    def gradient_sync(self, model: Module, enabled: bool) -> AbstractContextManager[Any]:
        """Return a block in which backward exchanges gradients between ranks, or does not."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        """Compute the gradients of one of the ``num_steps`` losses of a window."""
        if num_steps > 1:
            loss = loss / num_steps
        if self.scaling is not None:
            loss = self.scaling.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def forward_backward(
        self,
        model: Module,
        inputs: Any,
        targets: Any,
        loss_function: Callable[[Any, Any], torch.Tensor],
        num_steps: int = 1,
    ) -> torch.Tensor:
        """Run forward, loss and backward of one batch; returns the loss, on every rank."""
        loss = loss_function(call_model(model, inputs), targets)
        self.backward(loss, num_steps)
        return loss.detach()

    def divide_sequences(
        self,
        buffers: Sequence[torch.Tensor],
        seq_dims: Sequence[int],
        no_restore: set[torch.Tensor],
    ) -> AbstractContextManager[Any]:
        """A block in which each rank has its part of tensors along a sequence; nothing where
        sequences are not divided."""
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the gradients to a norm over all ranks; returns the norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        """Return the weights of an unwrapped model: whole, or (``full=False``) this rank's part.

        With ``keeps=False`` this rank takes part in joining what is in parts, for others, and need
        not get it.
        """
        return model.state_dict()

    def is_in_parts(self, model: Module) -> bool:
        """Whether this rank has only a part of a model that was prepared."""
        return False

    def own_state_dict(self, model: Module) -> dict[str, Any] | None:
        """Return the weights of a model that this rank has, parts as they are.

        Asked of each rank by itself, without a collective, as a run is stopped (``rescue``); None
        where the notebook could not join what the ranks give.
        """
        return dict(model.state_dict())

    def load_state_dict(self, model: Module, state: dict[str, Any], *, strict: bool = True) -> None:
        """Load whole weights into a model without wrapper."""
        model.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        """Return the whole state of an optimizer; ``keeps`` as of :meth:`state_dict`."""
        return optimizer.state_dict()

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return the state of an optimizer that this rank has, as :meth:`own_state_dict`."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a whole state into an optimizer."""
        optimizer.load_state_dict(state)

    def drop_unreduced(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an open window that the library which spreads the weights keeps
        elsewhere than in their ``grad``."""

    def own_piece(self, options: dict[str, Any]) -> Piece | None:
        """The piece of a checkpoint by which the strategy's library writes models and optimizers
        itself, with what ``save_state`` was told for it; None where it does not."""
        return None

    def read_own(self, folder: Path, options: dict[str, Any], *, strict: bool) -> bool:
        """Let the strategy's library read what :meth:`own_piece` wrote, with what ``load_state``
        was told for it; False where that is not there."""
        return False

    def make_whole(self, values: Any) -> Any:
        """Return ``values`` with whole tensors in place of parts; all ranks call it."""
        return values

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        topology.barrier()

    def forget(self) -> None:
        """Forget the prepared objects, so that others can be prepared."""

    def close(self) -> None:
        """Release what the strategy made for itself, such as a process group."""
