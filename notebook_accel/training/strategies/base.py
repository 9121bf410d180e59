"""``Strategy``: the interface of all kinds of parallelism, implemented here for a single device.

A new kind of parallelism is a subclass in a file of its own, and one line in the table of
``strategies/__init__.py``. It writes the first three methods; the others mean what they do on a
single device where it does not override them. The rest of ``training`` calls these methods and
never checks which strategy it has::

    settings --table--> Strategy --prepare_model, prepare_optimizer--> what the loop calls
                           |--data_group--> loaders, gather, reduce
                           |--gradient_sync, StrategyDefaults --> the loop
                           '--StrategyDefaults --> checkpoints

A user may pass ``prepare`` a ``DistributedDataParallel``, a ``DataParallel`` or a model on which
``fully_shard`` or ``parallelize_module`` was called. Such a model is not wrapped again. Gradient
accumulation, gradient norms and checkpoints need the same code for it as for a model that
``prepare`` wrapped or sharded: so that code is here, for all strategies. It imports ``DTensor``,
which takes a second, only where there are such weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.private import of_torch
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.models import set_within
from notebook_accel.training.processes import devices
from notebook_accel.training.settings.handlers import DistributedType
from notebook_accel.training.settings.parallelism import ParallelismConfig
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from notebook_accel.training.stepping.step_timer import measure_steps
from notebook_accel.training.strategies.compiling import compile_model
from notebook_accel.training.strategies.defaults import StrategyDefaults, dtensors_of
from notebook_accel.training.strategies.strategy_request import ModelToPrepare, PrepareCall, Request


class Strategy(StrategyDefaults):
    """Base class of the kinds of parallelism, and the strategy for a single device.

    Attributes:
        distributed_type: None if the value follows from the device and the number of ranks.
        label: what users call it, shown in the view of a run; "" for plain training.
        mesh: the device mesh of the ranks; None without ``parallelism_config`` or sharding.
        is_engine: whether a library's engine trains the model (DeepSpeed): it sets the precision
            itself, and :meth:`expect` tells it which model and optimizer belong together.
    """

    distributed_type: DistributedType | None = None
    label = ""
    mesh: DeviceMesh | None = None
    is_engine: bool = False
    parallelism: ParallelismConfig | None = None

    def __init__(self, request: Request) -> None:
        self.request = request
        self.topology = request.topology
        self.precision = request.precision
        self.accumulation = request.accumulation
        self.parallelism = request.plugins.get("parallelism_config")
        self.scaling = request.precision.make_scaling(self.kind_of_scaling)
        self.data_group = DataGroup.of_all_ranks(
            self.topology.num_processes, self.topology.process_index
        )
        self.spread = weakref.WeakSet()
        # Whether backward reduces the gradients of a sharded model; it does where nothing was set.
        self._reduces: weakref.WeakKeyDictionary[Module, bool] = weakref.WeakKeyDictionary()
        measure_steps(self.topology.device)

    # What a kind of parallelism does in its own way.

    def prepare_model(self, given: ModelToPrepare) -> Module:
        """Return the model that the loop calls: moved, compiled, and wrapped or sharded.

        All ranks call it. Its precision is set already.
        """
        if (dtensors := dtensors_of(given.model.parameters())) is None:
            return compile_model(self.place(given), self.request.dynamo)
        self.was_given_parts = True
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
        self._set_reducing(model, enabled)
        try:
            yield
        finally:
            self._set_reducing(model, before)

    def _set_reducing(self, model: Any, enabled: bool) -> None:
        if self._reduces.get(model, True) != enabled:  # to set it, torch walks over every module
            model.set_requires_gradient_sync(enabled)
            self._reduces[model] = enabled

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


@contextmanager
def _resumed(model: DistributedDataParallel) -> Iterator[None]:
    """Let backward inside a ``with`` block exchange gradients after a forward in ``no_sync``."""
    with set_within(model, require_backward_grad_sync=True, require_forward_param_sync=True):
        # The forward under no_sync left the reducer unprepared for an exchange.
        model.reducer.prepare_for_backward([])
        yield
