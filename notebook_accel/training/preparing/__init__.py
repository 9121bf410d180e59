"""``Preparation``: prepares the objects of one ``Accelerator``, and keeps lists of them.

The way of a model; an optimizer goes alike. No room is entered twice::

    Accelerator.prepare             accelerator.py
      Preparation.prepare           here: the kinds of objects one after the other
        Accelerator.prepare_model   which a subclass may override
          Preparation.prepare_model     unwrapped, its precision set (precision/), kept in the list
            Strategy.prepare_model      strategies/: moved, compiled, wrapped or sharded
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives import gather_object
from notebook_accel.training.collectives.nested import num_bytes
from notebook_accel.training.data import prepare_loader
from notebook_accel.training.data.loaders import PreparedLoader
from notebook_accel.training.data.samplers import batch_size_of
from notebook_accel.training.data.unprepared import watch_loaders
from notebook_accel.training.models import PreparedModel, strip_forward
from notebook_accel.training.preparing.state_after_stop import RankPart, copy_on_meta, in_pieces
from notebook_accel.training.processes import device_memory
from notebook_accel.training.processes.devices import device_module
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.notices import notice, notice_once
from notebook_accel.training.stepping.optimizer import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    UnpreparedWatch,
    inner_optimizer,
)
from notebook_accel.training.stepping.step_timer import step_timer
from notebook_accel.training.strategies.base import ModelToPrepare, PrepareCall, Strategy

# Packages whose objects torch cannot train: passing them through would fail much later.
_FOREIGN = {"flax", "haiku", "jax", "jaxlib", "keras", "mlx", "mxnet", "optax", "paddle"}
_FOREIGN |= {"tensorflow", "tf_keras", "tinygrad"}


# Classes in which strategies, or users, wrap a model, whose ``module`` is the model itself.
_WRAPPERS = {
    "deepspeed.runtime.engine.DeepSpeedEngine",
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
}


class Preparation:
    """Prepares models, optimizers, schedulers and loaders for one ``Accelerator``.

    It keeps lists of them, for checkpoints and for the state of a stopped run.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.request = request = strategy.request
        self.models: list[PreparedModel] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[DataLoader[Any]] = []
        # A weak reference to the Checkpoints of these objects, which set it.
        self.checkpoints: Callable[[], Any] = lambda: None
        # Hooks that load the checkpoint of a resumed launch.
        self.resumers: list[RemovableHandle] = []
        self.watch = UnpreparedWatch(
            accumulation=request.accumulation, scaling=strategy.scaling, models=self.models
        )

    def prepare(
        self, objects: Sequence[Any], placement: Sequence[bool | None], accelerator: Any
    ) -> list[Any]:
        """Return the prepared objects, in the order given; all ranks call it.

        Models are prepared first, then optimizers, then loaders and schedulers, since a scheduler
        needs its prepared optimizer.

        Args:
            placement: for each object, whether it is moved to the device; None: as
                ``Accelerator(device_placement=...)`` says.
        """
        if not isinstance(placement, Sequence):
            raise ConfigError(
                f"prepare(device_placement={placement!r}): expected a list with one flag for each "
                "object, such as [False, True]; Accelerator(device_placement=False) is for all"
            )
        if len(placement) != len(objects):
            raise ConfigError(
                f"prepare() got {len(objects)} objects and device_placement for "
                f"{len(placement)}: give one for each"
            )
        for item in objects:
            _refuse_foreign(item)
            self._renew(item)
        strategy, ready = self.strategy, list(objects)
        # Into how many parts the ranks divide each batch of an unprepared loader.
        num_parts = strategy.data_group.size if self.request.loaders.split_batches else 1
        strategy.expect(
            PrepareCall(
                [item for item in objects if isinstance(item, Module)],
                [inner_optimizer(item) for item in objects if isinstance(item, Optimizer)],
                [item for item in objects if isinstance(item, LRScheduler)],
                # Schedules are counted in batches of the unprepared loader: by so many of these all
                # ranks together move at a time.
                strategy.data_group.size // num_parts,
                [size for item in objects for size in _batch_sizes(item, num_parts)],
            )
        )
        # A subclass of the Accelerator may override these; an engine is made by ours alone.
        own = self if strategy.is_engine else accelerator
        for index, item in self._new(objects, Module):
            model = own.prepare_model(item, device_placement=placement[index])
            inner = without_wrappers(model)
            # A subclass's own prepare_model may have wrapped it, without ours knowing.
            ready[index] = model if inner is model else self._take_wrapped(model, inner)
        for index, item in self._new(objects, Optimizer):
            # The user's own prepare_optimizer need not call ours, and the optimizer is to step the
            # weights that its model has since it was spread.
            strategy.prepare_optimizer(inner_optimizer(item))
            ready[index] = own.prepare_optimizer(item, device_placement=placement[index])
            self.watch.known.add(inner_optimizer(ready[index]))
        for index, item in self._new(objects, DataLoader):
            ready[index] = accelerator.prepare_data_loader(item, device_placement=placement[index])
        for index, item in self._new(objects, LRScheduler, AcceleratedScheduler):
            ready[index] = accelerator.prepare_scheduler(item)
        return ready

    def _new(self, objects: Sequence[Any], *kinds: type) -> Iterator[tuple[int, Any]]:
        """Yield (index, object) for those of some kinds that ``prepare`` has not returned before.

        A model that was prepared for evaluation is new: it may be prepared for training.
        """
        trained = [known.wrapped for known in self.models if known.training]
        lists: list[Sequence[object]] = [trained, self.optimizers, self.schedulers, self.loaders]
        ready = {id(known) for each in lists for known in each}
        return (
            (index, item)
            for index, item in enumerate(objects)
            if isinstance(item, kinds) and id(item) not in ready
        )

    def prepare_model(
        self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Module:
        """Return the prepared model; see ``Accelerator.prepare_model``."""
        num_ranks = self.request.topology.num_processes
        if num_ranks > 1 and isinstance(model, torch.nn.DataParallel):
            # It spreads a batch over the devices of one process; each rank has one device.
            notice_once(
                "DataParallel",
                f"prepare() took the model out of DataParallel: the {num_ranks} ranks train it",
            )
            model = model.module
        self._renew(model)
        training = not evaluation_mode
        inner = without_wrappers(model)
        if inner is not model:
            return self._take_wrapped(model, inner)
        for known in self.models:
            if known.inner is model and (known.training or not training):
                return known.wrapped
        strategy = self.strategy
        is_spread = _is_spread(model, num_ranks)
        device = None if is_spread else self._device(device_placement)
        shards = strategy.spreads_weights and training
        meta_copy = copy_on_meta(of_torch.original_module(model)) if shards else None
        if not strategy.is_engine:
            self.request.precision.wrap(model)
        wrapped = strategy.prepare_model(ModelToPrepare(model, training, device))
        self._keep(PreparedModel(model, wrapped, training, meta_copy))
        return wrapped

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return the prepared optimizer; see ``Accelerator.prepare_optimizer``."""
        strategy = self.strategy
        stepped = strategy.prepare_optimizer(inner_optimizer(optimizer))
        for known in self.optimizers:
            if known.optimizer is stepped:
                return known
        moves_state = self._device(device_placement) is not None
        prepared = strategy.wrap_optimizer(stepped, moves_state=moves_state)
        self.watch.known.add(stepped)
        self.optimizers.append(prepared)
        return prepared

    def _renew(self, item: object) -> None:
        """Update the wrapper of a prepared model that is passed to ``prepare`` again.

        User code may have unfrozen weights or added a layer in the meantime. If the strategy cannot
        update the wrapper in place, the model is removed from ``models``, so that the caller
        prepares it anew. Other objects are ignored.
        """
        self.models[:] = [
            known
            for known in self.models
            if not (known.training and any(item is each for each in (known.inner, known.wrapped)))
            or self.strategy.renew(known.wrapped)
        ]

    def _take_wrapped(self, model: Module, inner: Module) -> Module:
        """Register a model that is in a wrapper already, set its precision, and return it."""
        if not any(known.wrapped is model for known in self.models):
            self.request.precision.wrap(inner)
            self._keep(PreparedModel(inner, model, True))
        return model

    def _keep(self, prepared: PreparedModel) -> None:
        self.models[:] = [known for known in self.models if known.inner is not prepared.inner]
        self.models.append(prepared)
        # Should the run be stopped, this is what was being trained.
        context, request = current(), self.request
        precision = request.precision.name
        if precision == "no":
            types = (one.dtype for one in prepared.inner.parameters() if one.is_floating_point())
            precision = str(next(types, "")).removeprefix("torch.")
        device = request.topology.device
        name = "CPU"
        if device.type != "cpu":
            module = device_module(device.type)
            name = str(getattr(module, "get_device_name", lambda _: device.type)(device))
        about = name, precision, self.strategy.label
        context.note_training(self, ", ".join(filter(None, about)))
        if context.resume_from:  # a loop without a prepared loader begins with a forward
            hook = prepared.wrapped.register_forward_pre_hook(
                lambda *_: current().begin_training(), prepend=True
            )
            self.resumers.append(hook)
        group = self.strategy.data_group
        if prepared.training and group.size > 1:
            own = weakref.ref(self)
            watch_loaders(
                group, lambda: any(one.inner.training for one in getattr(own(), "models", ()))
            )

    @contextmanager
    def off_device(self) -> Iterator[None]:
        """Have what was prepared lie on the host for the time of a pause, which is no step's."""
        models = [known.inner for known in self.models]
        with device_memory.off_device(self.request.topology.device, models, self.optimizers):
            yield
        step_timer().drop()

    def resume(self) -> None:
        if (checkpoints := self.checkpoints()) is None:
            raise ConfigError("resume=: the Accelerator is gone; keep it in a variable")
        checkpoints.resume_launch(is_asked=False)

    def save(self, folder: str, *, unless: bool) -> str:
        # Some functions read `should_save` on one rank alone.
        if any(gather_object([unless])):
            return ""
        try:
            if (checkpoints := self.checkpoints()) is None:
                raise NotebookAccelError("the Accelerator is gone; keep it in a variable")
            return f"saved in {checkpoints.save(folder, safe=True)}"
        except (NotebookAccelError, OSError) as error:  # the training can go on without it
            return f"nothing was saved: {error}"

    def parts_to_rescue(self, num_steps: int, free: int) -> Iterator[RankPart]:
        """Yield this rank's training state in alternative forms, the most complete first.

        It is called on each rank of a run that was stopped or interrupted. The rank sends the
        notebook the first form that can be pickled. Rank 0 yields a form with the models, then a
        form with state dicts alone. If any model is sharded, other ranks yield the form with state
        dicts; if not, they yield no more than their random states, since rank 0 has the rest.

        What the host has no free memory for is left out, and one line says so: first the
        optimizers' states, then everything. This rank makes a copy to send, and the notebook joins
        the copies.

        Args:
            free: bytes of the host's memory that the copies may take.
        """
        strategy, context = self.strategy, current()
        topology = strategy.topology
        is_first = topology.process_index == 0
        in_parts = [strategy.is_in_parts(known.inner) for known in self.models]
        if not self.models:
            return
        checkpoints = self.checkpoints()
        files = {} if checkpoints is None else checkpoints.states_at_stop()
        if not (is_first or any(in_parts)):
            if files:  # its random states
                own = {name: state for name, state in files.items() if name.startswith("random")}
                yield RankPart(step=num_steps, files=own)
            return
        models = [known.plain for known in self.models]
        # Ranks of one machine that all have parts copy theirs at the same time.
        num_copies = 2 * (topology.local_num_processes if any(in_parts) else 1)
        weights = [[*model.parameters(), *model.buffers()] for model in models]
        if (needed := num_copies * sum(map(num_bytes, weights))) > free:
            notice(f"what was being trained is not kept: {_of_memory(needed, free)}")
            return
        optimizers = [strategy.own_optimizer_state(known.optimizer) for known in self.optimizers]
        dropped = []
        if (needed := needed + num_copies * num_bytes(optimizers)) > free:
            dropped = [f"the optimizers' states are not kept: {_of_memory(needed, free)}"]
            notice(*dropped)
            optimizers = [None for _ in optimizers]
        without = RankPart(
            models=[None for _ in models],
            weights=[
                in_pieces(dict(strategy.state_dict(model, full=False)))
                if is_part and strategy.joins_later
                else None
                for model, is_part in zip(models, in_parts, strict=True)
            ],
            optimizers=[in_pieces(state) for state in optimizers],
            schedulers=[known.scheduler.state_dict() for known in self.schedulers],
            step=num_steps,
            missing=dropped,
            files=files,
            at_common_point=context.left_with_all or not context.is_interrupted,
            is_stepping=context.is_stepping,
        )
        if is_first:
            models_sent = [
                known.meta_copy if is_part else model
                for known, model, is_part in zip(self.models, models, in_parts, strict=True)
            ]
            yield replace(without, models=models_sent)
            for index, is_part in enumerate(in_parts):
                if not is_part:
                    without.weights[index] = in_pieces(dict(models[index].state_dict()))
        yield without

    def memory_parts(self, error: BaseException) -> dict[str, int]:
        """Return the bytes of the device's memory that each part takes, if ``error`` is for them.

        The dictionary is empty if ``error`` does not say that memory ran out.
        """
        if not device_memory.is_out_of_memory(error):
            return {}
        models = [known.inner for known in self.models]
        return device_memory.memory_parts(self.request.topology.device, models, self.optimizers)

    def prepare_data_loader(
        self,
        loader: DataLoader[Any],
        placement: bool | None = None,
        slice_fn: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Return the prepared loader, which gives the batches of this rank.

        Args:
            placement: whether batches are moved to the device; None: as
                ``Accelerator(device_placement=...)`` says.
            slice_fn: takes one rank's part of a batch that rank 0 has read for all ranks (see
                ``Accelerator.prepare_data_loader``); None takes rows of tensors.
        """
        if any(known is loader for known in self.loaders):
            return loader
        request = self.request
        prepared = prepare_loader(
            loader,
            config=request.loaders,
            device=self._device(placement),
            data_group=self.strategy.data_group,
            rng_types=request.rng_types,
            slice_fn=slice_fn,
            ordinal=len(self.loaders),
        )
        prepared.accumulation = request.accumulation
        self.loaders.append(prepared)
        return prepared

    def prepare_scheduler(
        self, scheduler: LRScheduler | AcceleratedScheduler
    ) -> AcceleratedScheduler:
        """Return the prepared scheduler, which by default steps only if its optimizer stepped.

        If the optimizer that the scheduler was made with is not prepared, all prepared optimizers
        count as its optimizers.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            scheduler = scheduler.scheduler
        for known in self.schedulers:
            if known.scheduler is scheduler:
                return known
        request = self.request
        own = (scheduler.optimizer, getattr(scheduler.optimizer, "optimizer", None))
        bound = [
            known
            for known in self.optimizers
            if any(known is it or known.optimizer is it for it in own)
        ]
        prepared = self.strategy.wrap_scheduler(
            scheduler,
            bound or self.optimizers,
            accumulation=request.accumulation,
            split_batches=request.loaders.split_batches,
            num_shares=self.strategy.data_group.size,
            step_with_optimizer=request.step_scheduler_with_optimizer,
        )
        self.schedulers.append(prepared)
        return prepared

    def clear(self) -> None:
        """Empty the lists of prepared models, optimizers, schedulers and loaders."""
        for known in (self.models, self.optimizers, self.schedulers, self.loaders):
            cast("list[Any]", known).clear()

    def _device(self, placement: bool | None) -> torch.device | None:
        wanted = self.request.device_placement if placement is None else placement
        return self.request.topology.device if wanted else None


def _of_memory(needed: int, free: int) -> str:
    return f"the copies need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"


def _batch_sizes(item: object, num_shares: int) -> list[int]:
    """Return ``[batch size of one rank]`` for a loader; [] if the size is not known."""
    if not isinstance(item, DataLoader):
        return []
    if isinstance(item, PreparedLoader):  # it is divided already
        size, num_shares = item.own_batch_size, 1
    else:
        size = batch_size_of(item)
    return [size // num_shares] if isinstance(size, int) else []


def _refuse_foreign(item: object) -> None:
    if isinstance(item, (Module, Optimizer)):
        return
    for kind in type(item).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _FOREIGN:
            raise TypeError(
                f"prepare() got a {type(item).__name__} of {package}: expected what torch trains "
                "(modules, optimizers, schedulers and data loaders of torch)"
            )


def _is_spread(model: Module, num_processes: int) -> bool:
    """Return whether a ``device_map`` of Transformers spreads a model over several devices.

    Such a model is not moved by ``prepare``.
    """
    devices = set((getattr(of_torch.original_module(model), "hf_device_map", None) or {}).values())
    if len(devices) < 2:
        return False
    if num_processes > 1 and not environment.read_flag("BYPASS_DEVICE_MAP"):
        raise ConfigError(
            f"the model is spread over {len(devices)} devices (device_map) and there are "
            f"{num_processes} ranks: load it without device_map, or start one process; "
            "ACCELERATE_BYPASS_DEVICE_MAP=true lets each rank train it where it is"
        )
    return True


def unwrap(model: Module) -> Module:
    """Return the model inside all wrappers: DDP, ``DataParallel`` and DeepSpeed's engine."""
    while _WRAPPERS & {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}:
        model = model.module  # type: ignore[assignment]
    return model


def extract_model_from_parallel(
    model: Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> Module:
    """Return the model inside the wrappers that ``prepare`` added.

    Args:
        model: a prepared model.
        keep_fp32_wrapper: whether the forward keeps its mixed precision. False restores the
            original forward, for the prepared model too.
        keep_torch_compile: whether a compiled model stays compiled. False returns the model that
            ``torch.compile`` was given. A model that was sharded over ranks is compiled in place,
            and stays compiled in any case.
        recursive: remove the wrappers (DDP and the like) of modules inside of the model, too.

    Example:
        >>> import torch
        >>> from notebook_accel import Accelerator
        >>> from notebook_accel.utils import extract_model_from_parallel
        >>> model = Accelerator().prepare(torch.nn.Linear(2, 1))
        >>> type(extract_model_from_parallel(model)).__name__
        'Linear'
    """
    inner: Any = unwrap(model)
    for module in list(inner.modules()) if recursive else ():
        for name, child in module.named_children():
            setattr(module, name, unwrap(child))
    given = unwrap(of_torch.original_module(inner))
    if not keep_torch_compile:
        inner = given
    elif given is not of_torch.original_module(inner):
        # A wrapper was compiled. Accelerate takes it out of the compiled module, which the script
        # may go on to train; so here is another one, compiled the same way.
        inner = type(inner)(given, inner.dynamo_ctx)
    if not keep_fp32_wrapper:
        strip_forward(given)
        strip_forward(inner)
    return inner  # type: ignore[no-any-return]


def without_wrappers(model: Module) -> Module:
    """Return the model inside all wrappers (DDP and the like), added by the user or ``prepare``.

    If ``torch.compile`` was applied to the wrapper, the uncompiled model is returned; if it was
    applied to the model inside, the compiled model.
    """
    inner = unwrap(model)
    given = unwrap(of_torch.original_module(inner))
    return inner if given is of_torch.original_module(inner) else given
