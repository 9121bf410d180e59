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


class Strategy:
    """Base class of the kinds of parallelism, and the strategy for a single device.

    The ``Accelerator`` of each rank has a strategy, which wraps or shards the prepared models, runs
    backward, and collects state dicts for checkpoints.

    Attributes:
        distributed_type: the value of ``accelerator.distributed_type``; None if that value follows
            from the device and the number of ranks.
        topology: rank, number of ranks and device of this process.
        precision: the mixed precision.
        handlers: the ``kwargs_handlers`` of the user.
        dynamo: settings of ``torch.compile``.
        scaling: the loss scaling of fp16; None if losses are not scaled, or if the strategy's
            library scales them (DeepSpeed).
        kind_of_scaling: the class of ``scaling``.
        mesh: the device mesh of the ranks; None without ``parallelism_config`` or sharding.
        spreads_weights: whether weights are sharded or divided over ``mesh``.
        prepares_together: whether a model and its optimizer are prepared in one step, so that
            ``prepare_model`` and ``prepare_optimizer`` of an ``Accelerator`` are not called.
        parallelism: number of ranks for each kind of parallelism; None if it was not set.
        data_group: which ranks read different samples, and which read the same.
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
        measure_steps(self.topology.device)

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale losses with another ``GradScaler`` from now on; None turns loss scaling off.

        Raises:
            ConfigError: the scaler is of a class that this strategy does not support.
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
        """Whether each rank writes its shards of the weights into a checkpoint.

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

        The base class moves the model to its device and compiles it if asked for; subclasses also
        wrap or shard it. :meth:`prepare` has already set the mixed precision of the model's
        forward.
        """
        return compile_model(self.place(given), self.dynamo)

    def renew(self, model: Module) -> bool:
        """Update the wrapper of a prepared model that is passed to ``prepare`` again, in place.

        User code may have frozen or unfrozen weights, or added a layer, since the model was
        prepared.

        Returns:
            True if the prepared model can be used from now on; False if the caller must prepare it
            like a new model.
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
        """Return the optimizer that the loop steps.

        Args:
            optimizer: an optimizer that :meth:`prepare` returned.
            accumulation: the state of gradient accumulation.
            moves_state: whether the optimizer's state is moved to the device of its weights.
        """
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
        """Return the scheduler that the loop steps.

        Args:
            scheduler: the scheduler to wrap.
            optimizers: the prepared optimizers whose learning rates it sets.
            **settings: further arguments of ``AcceleratedScheduler``.
        """
        return AcceleratedScheduler(scheduler, optimizers, **settings)

    def gradient_sync(self, model: Module, enabled: bool) -> AbstractContextManager[Any]:
        """Return a context manager that turns the gradient exchange of backward on or off.

        Args:
            model: the prepared model.
            enabled: whether backward inside the block exchanges gradients between the ranks.
        """
        return nullcontext()

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        """Compute the gradients of one batch's loss.

        Args:
            loss: the loss. It is divided by ``num_steps``, and multiplied by the loss scale.
            num_steps: number of batches whose gradients are accumulated for a step.
            **kwargs: arguments of ``loss.backward``.
        """
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
        """Run forward, loss and backward of one batch; return the loss, detached.

        The arguments are those of ``Accelerator.forward_backward``; ``num_steps`` is that of
        :meth:`backward`.
        """
        loss = loss_function(call_model(model, inputs), targets)
        self.backward(loss, num_steps)
        return loss.detach()

    def divide_sequences(
        self,
        buffers: Sequence[torch.Tensor],
        seq_dims: Sequence[int],
        no_restore: set[torch.Tensor],
    ) -> AbstractContextManager[Any]:
        """Return a context manager in which tensors hold this rank's part of their sequences.

        It serves context parallelism. Without context parallelism, as in this base class, the block
        changes nothing.

        Args:
            buffers: the tensors, which are changed in place.
            seq_dims: the sequence dimension of each buffer.
            no_restore: buffers that need not be restored after the block.
        """
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
            model: the model.
            full: whether sharded tensors are joined to full ones. False returns this rank's shards.
            keeps: False for a rank that only helps to join tensors for other ranks. Such a rank may
                get an empty dictionary, which saves memory.
        """
        return model.state_dict()

    def is_in_parts(self, model: Module) -> bool:
        """Return whether this rank has only a part of a prepared model's weights."""
        return False

    def own_state_dict(self, model: Module) -> dict[str, Any] | None:
        """Return this rank's part of a model's state dict, without a collective.

        Each rank calls it on its own when a run was stopped, to send its part to the notebook.

        Returns:
            The state dict, with sharded tensors as they are; None if the notebook could not join
            the parts of the ranks.
        """
        return dict(model.state_dict())

    def load_state_dict(self, model: Module, state: dict[str, Any], *, strict: bool = True) -> None:
        """Load full (unsharded) weights into a model without wrapper; all ranks call it."""
        model.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        """Return the full state dict of an optimizer; with sharded weights, all ranks call it.

        ``keeps`` has the same meaning as in :meth:`state_dict`.
        """
        return optimizer.state_dict()

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return this rank's part of an optimizer's state dict, without a collective.

        It is None if the notebook could not join the parts of the ranks (see
        :meth:`own_state_dict`).
        """
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full (unsharded) state dict into an optimizer; all ranks call it."""
        optimizer.load_state_dict(state)

    def drop_unreduced(self, optimizer: Optimizer) -> None:
        """Drop accumulated gradients that are not in the ``grad`` of the optimizer's weights.

        ``fully_shard`` keeps gradients elsewhere until they are reduced over the ranks. On a single
        device, as in this base class, there are no such gradients, and nothing is dropped.
        """

    def own_piece(self, options: dict[str, Any]) -> Piece | None:
        """Return the piece of a checkpoint that the strategy's library writes itself, if any.

        Args:
            options: further arguments of ``save_state``, for that library.

        Returns:
            A piece with the models and optimizers (DeepSpeed); None if this package writes them.
        """
        return None

    def read_own(self, folder: Path, options: dict[str, Any], *, strict: bool) -> bool:
        """Have the strategy's library load the files that :meth:`own_piece` wrote.

        Args:
            folder: the checkpoint.
            options: further arguments of ``load_state``, for that library.
            strict: whether the names of weights must match exactly.

        Returns:
            True if the models and optimizers were loaded; False if the checkpoint has no such
            files, so that this package must load them.
        """
        return False

    def make_whole(self, values: Any) -> Any:
        """Return nested ``values`` with sharded tensors joined to full ones; all ranks call it."""
        return values

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        topology.barrier()

    def forget(self) -> None:
        """Release the prepared objects, so that others can be prepared in their place."""

    def close(self) -> None:
        """Release resources that the strategy made for itself, such as a process group.

        ``Accelerator.end_training`` calls it.
        """
