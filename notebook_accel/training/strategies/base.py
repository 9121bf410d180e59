"""``Strategy``: the interface of all kinds of parallelism, implemented here for a single device.

A new kind of parallelism is a subclass in a file of its own, and one line in the table of
``strategies/__init__.py``. It writes the first three methods; the others mean what they do on a
single device where it does not override them. The rest of ``training`` calls these methods and
never checks which strategy it has::

    settings --table--> Strategy --prepare_model, prepare_optimizer--> what the loop calls
                           |--data_group--> loaders, gather, reduce
                           |--gradient_sync, backward, clip_grad_norm --> the loop
                           '--state_dict, format --> checkpoints

A user may pass ``prepare`` a ``DistributedDataParallel``, a ``DataParallel`` or a model on which
``fully_shard`` or ``parallelize_module`` was called. Such a model is not wrapped again. Gradient
accumulation, gradient norms and checkpoints need the same code for it as for a model that
``prepare`` wrapped or sharded: so that code is here, for all strategies. It imports ``DTensor``,
which takes a second, only where there are such weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.errors import ConfigError
from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.files import Format
from notebook_accel.training.models import has_parts, set_within, weights_of
from notebook_accel.training.precision import LossScaling, Precision, SpreadScaler
from notebook_accel.training.processes import devices
from notebook_accel.training.processes.topology import Topology
from notebook_accel.training.settings.handlers import (
    DataLoaderConfiguration,
    DistributedType,
    KwargsHandler,
)
from notebook_accel.training.settings.parallelism import ParallelismConfig
from notebook_accel.training.stepping.accumulation import Accumulation
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from notebook_accel.training.stepping.step_timer import start_timer, step_timer
from notebook_accel.training.strategies.compiling import TorchDynamoPlugin, compile_model

if TYPE_CHECKING:
    from notebook_accel.training.strategies.context import SequenceDivider


LossFunction = Callable[[Any, Any], torch.Tensor]
"""From outputs and targets to the loss, as ``forward_backward`` takes it."""


@dataclass(kw_only=True)
class Request:
    """The settings of one ``Accelerator``, by which its strategy is chosen and made."""

    topology: Topology
    precision: Precision
    handlers: list[KwargsHandler]
    plugins: Mapping[str, Any]
    """The plugins in use, by the arguments of ``Accelerator``: ``plugins["fsdp_plugin"]``."""
    dynamo: TorchDynamoPlugin
    accumulation: Accumulation
    """The windows, for a strategy whose library exchanges gradients by them."""
    loaders: DataLoaderConfiguration
    device_placement: bool
    step_scheduler_with_optimizer: bool
    rng_types: tuple[str, ...] | None

    @property
    def mesh_dims(self) -> set[str]:
        """The dimensions with several ranks that ``parallelism_config`` asks for."""
        asked = self.plugins.get("parallelism_config")
        return set() if asked is None else set(asked.active_mesh_dims)


@dataclass
class ModelToPrepare:
    """A model that was passed to ``prepare``, and how it is to be prepared."""

    model: Module
    training: bool = True
    """False for a model that is only evaluated."""
    device: torch.device | None = None
    """Where to put it; None leaves it where it is."""


@dataclass
class PrepareCall:
    """All objects of one ``prepare`` call; DeepSpeed needs them together."""

    models: list[Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    schedule_steps: int = 1
    """By how much a schedule moves with a step of its optimizer."""
    batch_sizes: list[int] = field(default_factory=list)
    """Samples of a rank's batch, for each loader that knows its batch size."""


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call ``model`` with a batch: one argument, a tuple of arguments, or a mapping of keywords."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def dtensors_of(tensors: Iterable[Any]) -> ModuleType | None:
    """Return ``strategies.dtensors`` if a tensor is sharded; only then its import is needed."""
    return import_module(".dtensors", __package__) if has_parts(tensors) else None


def sharded(**given: Any) -> Format:
    """Return the format of shards; torch's distributed checkpoints take 0.3 s to import."""
    from notebook_accel.training.files.sharded import Sharded

    return Sharded(**given)


class Strategy:
    """Base class of the kinds of parallelism, and the strategy for a single device.

    Attributes:
        distributed_type: None if the value follows from the device and the number of ranks.
        label: what users call it, shown in the view of a run; "" for plain training.
        mesh: the device mesh of the ranks; None without ``parallelism_config`` or sharding.
        is_engine: whether a library's engine trains the model (DeepSpeed): it sets the precision
            itself, and :meth:`expect` tells it which model and optimizer belong together.
        scaling: None if losses are not scaled, or if the library scales them (DeepSpeed).
        sequences: divides sequences over the ranks; None without context parallelism.
        spread: prepared models of which this rank has only a part of the weights.
        joins_later: whether the notebook can join the state dicts that :meth:`state_dict` gives of
            parts.
    """

    distributed_type: DistributedType | None = None
    label = ""
    mesh: DeviceMesh | None = None
    is_engine: bool = False
    parallelism: ParallelismConfig | None = None
    scaling: LossScaling | None = None
    sequences: SequenceDivider | None = None
    spreads_weights: bool = False
    joins_later: bool = True

    def __init__(self, request: Request) -> None:
        self.request = request
        self.topology = request.topology
        self.precision = request.precision
        self.accumulation = request.accumulation
        self.parallelism = request.plugins.get("parallelism_config")
        self.scale_by(request.precision.make_scaler())
        self.data_group = DataGroup.of_all_ranks(
            self.topology.num_processes, self.topology.process_index
        )
        self.spread: weakref.WeakSet[Module] = weakref.WeakSet()
        # Whether backward reduces the gradients of a sharded model; it does where nothing was set.
        self._reduces: weakref.WeakKeyDictionary[Module, bool] = weakref.WeakKeyDictionary()
        # From now on steps are measured anew, on this device.
        start_timer(current(), self.topology.device)

    # What a kind of parallelism does in its own way.

    def prepare_model(self, given: ModelToPrepare) -> Module:
        """Return the model that the loop calls: moved, compiled, and wrapped or sharded.

        All ranks call it. Its precision is set already.
        """
        if (dtensors := dtensors_of(given.model.parameters())) is None:
            return compile_model(self.place(given), self.request.dynamo)
        self.spread.add(given.model)
        dtensors.accept_whole_weights(given.model)
        return given.model

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that steps the prepared model; all ranks call it, even twice.

        It is torch's or DeepSpeed's own: :meth:`wrap_optimizer` wraps it afterwards.
        """
        return optimizer

    def gradient_sync(self, model: Module, enabled: bool) -> AbstractContextManager[Any]:
        """Return a context manager that turns the gradient exchange of backward on or off."""
        inner = of_torch.original_module(model)
        if isinstance(inner, DistributedDataParallel):
            return _resumed(inner) if enabled else inner.no_sync()
        if hasattr(inner, "set_requires_gradient_sync"):  # after fully_shard
            return self._reducing(inner, enabled)
        return nullcontext()

    @contextmanager
    def _reducing(self, model: Any, enabled: bool) -> Iterator[None]:
        """Turn gradient reduction in a sharded model's backward on or off in a ``with`` block."""
        before = self._reduces.get(model, True)
        if enabled == before:  # to set it, torch walks over every module
            yield
            return
        try:
            self._reduces[model] = enabled
            model.set_requires_gradient_sync(enabled)
            yield
        finally:
            self._reduces[model] = before
            model.set_requires_gradient_sync(before)

    # What ``prepare`` asks besides.

    def expect(self, call: PrepareCall) -> None:
        """Look at all objects of one ``prepare`` call before the first of them is prepared."""

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

    def wrap_optimizer(self, optimizer: Optimizer, *, moves_state: bool) -> AcceleratedOptimizer:
        return AcceleratedOptimizer(
            optimizer,
            moves_state,
            accumulation=self.accumulation,
            scaling=self.scaling,
            device_memory=devices.memory_reader(self.topology.device),
            drop_unreduced=self.drop_unreduced,
        )

    def wrap_scheduler(
        self, scheduler: LRScheduler, optimizers: list[AcceleratedOptimizer], **settings: Any
    ) -> AcceleratedScheduler:
        return AcceleratedScheduler(scheduler, optimizers, **settings)

    def forget(self) -> None:
        """Release the prepared objects, so that others can be prepared in their place."""

    def close(self) -> None:
        """Release resources that the strategy made for itself, such as a process group."""

    # What training loops ask.

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        if num_steps > 1:
            loss = loss / num_steps
        if self.scaling is not None:
            loss = self.scaling.begin_backward().scale(loss)
        with step_timer().backward(loss):
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def forward_backward(
        self, model: Module, inputs: Any, targets: Any, loss_function: LossFunction, num_steps: int
    ) -> torch.Tensor:
        """Run forward, loss and backward of one batch; return the loss, detached."""
        loss = loss_function(call_model(model, inputs), targets)
        self.backward(loss, num_steps)
        return loss.detach()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the norm of the gradients, in place; return the norm before clipping.

        If weights are sharded, the norm is that over all shards, and all ranks call this together.
        """
        weights = list(parameters)
        if (dtensors := dtensors_of(weights)) is None:
            return torch.nn.utils.clip_grad_norm_(weights, max_norm, norm_type=norm_type)
        weights = [weight for weight in weights if weight.grad is not None]
        norm: torch.Tensor = dtensors.total_grad_norm(weights, norm_type, self.topology.device)
        for group in dtensors.by_mesh(weights):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
        return norm

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of the gradients to [-clip_value, clip_value], in place."""
        weights = list(parameters)
        dtensors = dtensors_of(weights)
        for group in dtensors.by_mesh(weights) if dtensors else [weights]:
            torch.nn.utils.clip_grad_value_(group, clip_value)

    def drop_unreduced(self, optimizer: Optimizer) -> None:
        """Drop accumulated gradients that are not yet in the weights' ``grad``."""
        # Asked by every zero_grad: all weights are looked at only where there is something to drop.
        if self.spread and (dtensors := dtensors_of(weights_of(optimizer))):
            dtensors.drop_unreduced(self.spread, {id(weight) for weight in weights_of(optimizer)})

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale losses with another ``GradScaler`` from now on; None turns loss scaling off."""
        expected = SpreadScaler if self.spreads_weights else torch.amp.GradScaler
        if scaler is not None and not isinstance(scaler, expected):
            raise ConfigError(
                f"accelerator.scaler is set to a {type(scaler).__name__}: expected None or a "
                f"{expected.__name__}, which the Accelerator has made: set it up by "
                "kwargs_handlers=[GradScalerKwargs(...)]"
            )
        # The property brings the scaler up to date with the last step first.
        before = None if self.scaling is None else self.scaling.scaler
        if scaler is not before:
            self.scaling = None if scaler is None else LossScaling(scaler)
            if isinstance(scaler, SpreadScaler):
                scaler.agrees = self.spreads_weights

    # What checkpoints ask.

    @property
    def saves_shards(self) -> bool:
        """Whether each rank writes its shards of the weights.

        If False, rank 0 writes full weights.
        """
        return False

    @property
    def format(self) -> Callable[..., Format]:
        """How checkpoints keep the models and optimizers: a subclass of ``Format``."""
        return sharded if self.saves_shards else Format

    @property
    def saves_together(self) -> bool:
        """Whether all ranks must take part in saving, since each has only a part of a model."""
        return self.saves_shards or self.spreads_weights or bool(self.spread)

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        """Return the state dict of an unwrapped model; with sharded weights, all ranks call it.

        Args:
            full: whether sharded tensors are joined to full ones. False returns this rank's shards,
                without a collective.
            keeps: False for a rank that only helps to join tensors for other ranks. Such a rank may
                get an empty dictionary, which saves memory.
        """
        dtensors = dtensors_of(model.parameters()) if full else None
        if dtensors is None:
            return model.state_dict()
        whole: dict[str, Any] = dtensors.whole_state_dict(model, keeps=keeps, to_cpu=True)
        return whole

    def is_in_parts(self, model: Module) -> bool:
        """Return whether this rank has only a part of a prepared model's weights."""
        # Not by its weights: while a forward runs, those of a sharded module are whole.
        return model in self.spread

    def load_state_dict(self, model: Module, state: dict[str, Any], *, strict: bool = True) -> None:
        """Load full (unsharded) weights into a model without wrapper; all ranks call it."""
        model.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        """Return the full state dict of an optimizer; with sharded weights, all ranks call it."""
        if (dtensors := dtensors_of(weights_of(optimizer))) is None:
            return optimizer.state_dict()
        whole = dtensors.make_whole(optimizer.state_dict(), keeps=keeps, to_cpu=True)
        return whole if keeps else {}

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return this rank's part without a collective.

        None if the notebook could not join the parts.
        """
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full (unsharded) state dict into an optimizer; all ranks call it."""
        dtensors = dtensors_of(weights_of(optimizer))
        if dtensors is None:
            optimizer.load_state_dict(state)
        else:
            dtensors.load_optimizer_state(optimizer, state)

    def read_own(self, folder: Path, options: dict[str, Any], *, strict: bool) -> bool:
        """Load what the strategy's library wrote; False if the checkpoint has no such files."""
        return False

    def make_whole(self, values: Any) -> Any:
        """Return nested ``values`` with sharded tensors joined to full ones; all ranks call it."""
        if not self.saves_together:
            return values
        from notebook_accel.training.strategies import dtensors

        return dtensors.make_whole(values, to_cpu=True)


@contextmanager
def _resumed(model: DistributedDataParallel) -> Iterator[None]:
    """Let backward inside a ``with`` block exchange gradients after a forward in ``no_sync``."""
    with set_within(model, require_backward_grad_sync=True, require_forward_param_sync=True):
        # The forward under no_sync left the reducer unprepared for an exchange.
        model.reducer.prepare_for_backward([])
        yield
