"""ZeRO by DeepSpeed: optimizer states, gradients and weights are sharded over the ranks.

DeepSpeed's engine does precision, loss scaling, accumulation and clipping itself. This module lets
the usual training loop drive the engine, and joins full weights for checkpoints.

DeepSpeed unscales, clips, steps and clears gradients in one call, ``engine.step``. The calls of the
loop do this::

    accelerator.backward(loss)      engine.backward: computes gradients, and reduces them over ranks
    accelerator.clip_grad_norm_()   engine.step with clipping, since only that call gives the norm
    optimizer.step()                engine.step, unless clipping has called it already
    optimizer.zero_grad()           after a step: nothing. Else drops the gradients of a step that
                                    was not taken; while batches accumulate, keeps them
    scheduler.step()                nothing, if the engine moves the scheduler itself
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.private import of_libraries
from notebook_accel.rank.this_rank import current, has_process_group
from notebook_accel.training.collectives.nested import convert_to_fp32, recursively_apply
from notebook_accel.training.files import Format, Piece
from notebook_accel.training.files.state_files import explain, is_safe_name
from notebook_accel.training.models import joined_state_dict, set_within, weights_of
from notebook_accel.training.processes import devices
from notebook_accel.training.settings.environment import is_installed
from notebook_accel.training.settings.handlers import DistributedType
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from notebook_accel.training.stepping.step_timer import step_timer
from notebook_accel.training.strategies.base import ModelToPrepare, PrepareCall, Request, Strategy
from notebook_accel.training.strategies.deepspeed_plugin import DummyOptim, DummyScheduler, complete

_GROUP = "process group that DeepSpeed knows"


class DeepSpeedZero(Strategy):
    """Strategy that trains one model by a DeepSpeed engine."""

    distributed_type = DistributedType.DEEPSPEED
    saves_shards = True
    joins_later = False  # in stage 3 weights are empty: their parts lie in one flat buffer
    is_engine = True

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.plugin = request.plugins["deepspeed_plugin"]
        self.label = f"DeepSpeed ZeRO-{self.plugin.zero_stage}"
        self.scaling = None
        self.engine: DeepSpeedEngineWrapper | None = None
        # The model and optimizer of the engine that this prepare() is to make, and its objects.
        self._expected: tuple[Module, Optimizer, PrepareCall] | None = None
        self._given_optimizer: Optimizer | None = None
        # Whether the next backward ends its window; None: as the window says.
        self._exchanges: bool | None = None
        # The types of the user's weights before DeepSpeed's; saved weights get them back.
        self._dtypes: dict[str, torch.dtype] = {}
        self._makes_group = not has_process_group()
        self._library = _load_library(self.topology.device, self.topology.local_process_index)
        device = self._library.accelerator.get_accelerator()
        if self.precision.name == "fp16" and not device.is_fp16_supported():
            raise ConfigError(
                f'mixed_precision="fp16": DeepSpeed does not compute in fp16 on the '
                f'{self.topology.device.type} of this machine; use mixed_precision="bf16"'
            )

    def expect(self, call: PrepareCall) -> None:
        new = [each for each in call.optimizers if not self._steps_by(each)]
        if not new:
            self._expected = None
            return
        if len(new) > 1 or self.engine is not None:
            raise ConfigError(
                "DeepSpeed trains one model by one optimizer an Accelerator, and prepare() got "
                f"{len(new) + (self.engine is not None)} optimizers: make another Accelerator for "
                "another model"
            )
        for model in call.models:
            own = {id(weight) for weight in model.parameters()}
            if any(id(weight) in own for weight in weights_of(new[0])):
                self._expected = model, new[0], call
                return
        raise ConfigError(
            f"prepare() got a {type(new[0]).__name__} without the model whose parameters it has: "
            "DeepSpeed needs both in one call, prepare(model, optimizer, ...)"
        )

    def _steps_by(self, optimizer: Optimizer) -> bool:
        """Return whether the engine was made of this optimizer, or has made it."""
        of_engine = self.engine and (self._given_optimizer, self.engine.engine.basic_optimizer)
        return any(optimizer is each for each in of_engine or ())

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if not self._steps_by(optimizer):
            self.expect(PrepareCall(optimizers=[optimizer]))
        assert self.engine is not None
        return self.engine.engine.basic_optimizer  # type: ignore[no-any-return]

    def prepare_model(self, given: ModelToPrepare) -> Module:
        """Prepare a model: with its optimizer by an engine; without, to be evaluated.

        One without optimizer is sharded in ZeRO stage 3, else each rank has a full copy.
        """
        if self._expected is not None and given.model is self._expected[0]:
            (_, self._given_optimizer, call), self._expected = self._expected, None
            return self._make_engine(given.model, self._given_optimizer, call)
        if self.plugin.zero_stage != 3:
            self.precision.wrap(given.model)
            return super().prepare_model(given)
        config = complete(self.plugin, given.model, PrepareCall(), self.request)
        # This model has no optimizer: DeepSpeed would make the one in the configuration.
        config.pop("optimizer", None), config.pop("scheduler", None)
        engine, *_ = self._initialize(given.model, config)
        return engine  # type: ignore[no-any-return]

    def _make_engine(self, model: Module, optimizer: Optimizer, call: PrepareCall) -> Module:
        placeholder = optimizer if isinstance(optimizer, DummyOptim) else None
        schedule = next((one for one in call.schedulers if isinstance(one, DummyScheduler)), None)
        _check_sections(self.plugin.deepspeed_config, optimizer, call.schedulers)
        self.plugin.set_moe_leaf_modules(model)
        config = complete(self.plugin, model, call, self.request)
        state = model.state_dict().items()
        self._dtypes = {name: value.dtype for name, value in state if torch.is_tensor(value)}
        engine, *_ = self._initialize(
            model,
            config,
            optimizer=None if placeholder else optimizer,
            model_parameters=placeholder.params if placeholder else None,
            lr_scheduler=schedule.lr_scheduler_callable if schedule else None,
        )
        self.engine = DeepSpeedEngineWrapper(engine)
        return engine  # type: ignore[no-any-return]

    def _initialize(self, model: Module, config: dict[str, Any], **given: Any) -> Any:
        index = self.topology.device.index
        made = self._library.initialize(
            args=SimpleNamespace() if index is None else SimpleNamespace(device_rank=index),
            model=model,
            config=config,
            **given,
        )
        if self.precision.dtype is not None:
            _convert_inputs_and_outputs(model, self.precision.dtype)
        return made

    def wrap_optimizer(self, optimizer: Optimizer, *, moves_state: bool) -> AcceleratedOptimizer:
        assert self.engine is not None
        return DeepSpeedOptimizerWrapper(
            optimizer,
            self.engine,
            accumulation=self.accumulation,
            device_memory=devices.memory_reader(self.topology.device),
        )

    def wrap_scheduler(
        self, scheduler: LRScheduler, optimizers: list[AcceleratedOptimizer], **settings: Any
    ) -> AcceleratedScheduler:
        if isinstance(scheduler, DummyScheduler) and self.engine is not None:
            own = self.engine.engine.lr_scheduler
            return DeepSpeedSchedulerWrapper(own, optimizers, **settings)
        return super().wrap_scheduler(scheduler, optimizers, **settings)

    def gradient_sync(self, model: Module, enabled: bool) -> AbstractContextManager[None]:
        return set_within(self, _exchanges=enabled)

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        if self.engine is None:
            super().backward(loss, num_steps, **kwargs)
            return
        is_last = self.accumulation.sync_gradients if self._exchanges is None else self._exchanges
        with step_timer().backward(loss):
            self.engine.backward(loss / num_steps if num_steps > 1 else loss, is_last, **kwargs)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Take the optimizer step if it is due, with clipped gradients; return the unclipped norm.

        DeepSpeed clips and steps in one call, and the norm is known only afterwards. The
        ``optimizer.step()`` that follows does nothing. ``parameters`` is not used: the norm is that
        of all weights. Without an engine, the base class clips the gradients.
        """
        if self.engine is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_(norm_type={norm_type}): DeepSpeed clips by norm_type=2 alone"
            )
        if self.engine.is_due:
            limit = 0.0 if max_norm == float("inf") else max_norm
            with set_within(self.engine.engine.optimizer, clip_grad=limit):
                self.engine.step()
        return torch.tensor(self.engine.get_global_grad_norm(), device=self.topology.device)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        if self.engine is not None:
            raise ConfigError(
                "clip_grad_value_() was called, and DeepSpeed clips norms alone: use "
                "accelerator.clip_grad_norm_()"
            )
        super().clip_grad_value(parameters, clip_value)

    # Whole weights, and checkpoints.

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        if not full:
            return model.state_dict()
        keeps &= not self.is_in_parts(model) or self.topology.local_process_index == 0

        def join(name: str, value: Any) -> Any:
            made = _whole(value)
            return made.to(self._dtypes.get(name, made.dtype)) if torch.is_tensor(made) else made

        return joined_state_dict(model, join, keeps=keeps)

    def is_in_parts(self, model: Module) -> bool:
        return any(hasattr(weight, "ds_id") for weight in model.parameters())

    def load_state_dict(self, model: Module, state: dict[str, Any], *, strict: bool = True) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        own = model.state_dict(keep_vars=True)
        if strict and own.keys() != state.keys():
            missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise RuntimeError(
                f"the weights are not those of {type(model).__name__}: missing {missing}, "
                f"unknown {unknown}"
            )
        with torch.no_grad():
            # In the order of the model: all ranks gather the same weight at once, and the order of
            # a set of names differs from process to process.
            for name in [name for name in own if name in state]:
                owner, _, last = name.rpartition(".")
                if last == "_extra_state":  # what a module keeps beside its tensors
                    model.get_submodule(owner).set_extra_state(state[name])
                    continue
                weight, value = own[name], state[name].to(self.topology.device)
                with GatheredParameters([weight], modifier_rank=0):
                    weight.copy_(value)
                if of_libraries.has_stepped_copy(weight):
                    safe_set_full_fp32_param(weight, value.float())

    @property
    def format(self) -> Callable[..., Format]:
        if self.engine is None:
            return super().format
        return partial(DeepSpeedFiles, engine=self.engine.engine)

    def read_own(self, folder: Path, options: dict[str, Any], *, strict: bool) -> bool:
        if self.engine is None or not (folder / FOLDER).is_dir():
            return False
        DeepSpeedFiles().check_trust(folder)
        given = {"load_module_strict": strict, **options}
        self.engine.engine.load_checkpoint(str(folder), tag=FOLDER, **given)
        return True

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        assert self.engine is not None
        return self.engine.engine.optimizer.state_dict()  # type: ignore[no-any-return]

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        return None  # in parts, one flat buffer a rank

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        notice_once(
            "deepspeed optimizer",
            "the checkpoint was not written under DeepSpeed: weights were read, and the optimizer "
            "begins anew",
        )

    def forget(self) -> None:
        engine, self.engine = self.engine, None
        self._dtypes = {}
        if engine is not None:
            engine.engine.destroy()  # takes its hooks off the weights, which others may still have

    def close(self) -> None:
        if self._makes_group and has_process_group():
            dist.destroy_process_group()


def _load_library(device: torch.device, local_rank: int) -> ModuleType:
    """Import DeepSpeed, set it up for this device and process group, and return the module."""
    # DeepSpeed reads DS_ACCELERATOR as it is imported, and else takes whatever it finds.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    library = importlib.import_module("deepspeed")
    there = library.accelerator.get_accelerator().device_name()
    if there != device.type:
        raise ConfigError(
            f"DeepSpeed computes on {there!r} (variable DS_ACCELERATOR), and this rank on "
            f"{device.type!r}: unset the variable, or pass cpu=True to the Accelerator"
        )
    # On a CPU, DeepSpeed compiles a library for collectives of its inference as it starts (it needs
    # a compiler, takes a minute, and leaves 66 MB a rank in /dev/shm). Training uses none of it.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not has_process_group():
        backend = devices.default_backend(device)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    known = current().shared
    if known.get(_GROUP) not in (None, dist.group.WORLD):
        # Let it meet in the group that there is now: the one that it knows is gone.
        library.comm.comm.cdb = None
        of_libraries.forget_deepspeed_groups(library)
    known[_GROUP] = dist.group.WORLD
    # Not by MPI, which DeepSpeed asks where variables of its own launcher are not set.
    library.init_distributed(auto_mpi_discovery=False, verbose=False)
    return library


def _check_sections(
    config: dict[str, Any], optimizer: Optimizer, schedulers: list[LRScheduler]
) -> None:
    """Check that optimizer and schedulers are defined in one place: configuration or code."""
    makes_own = [one for one in schedulers if not getattr(one, "lr_scheduler_callable", None)]
    for section, stand_in, given in (
        ("optimizer", DummyOptim, [optimizer]),
        ("scheduler", DummyScheduler, makes_own),
    ):
        for one in given:
            if isinstance(one, stand_in) != (section in config):
                has = f"has the section {section!r}" if section in config else "has none"
                raise ConfigError(
                    f"prepare() got a {type(one).__name__}, and the DeepSpeed configuration {has}: "
                    f"a {stand_in.__name__} stands for the {section} of the configuration; give "
                    "both, or neither"
                )


def _convert_inputs_and_outputs(model: Module, dtype: torch.dtype) -> None:
    """Add hooks that cast a model's floating-point inputs to ``dtype``, its outputs to float32.

    A model with 16-bit weights needs them: loaders give batches in float32, and losses are
    computed in float32 under every precision.
    """

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    model.register_forward_pre_hook(
        lambda _, args, kwargs: recursively_apply(cast, (args, kwargs)), with_kwargs=True
    )
    model.register_forward_hook(lambda _, __, outputs: convert_to_fp32(outputs))


def _whole(value: Any) -> Any:
    """Return the full tensor of a sharded weight (its float32 copy, if any) on the CPU.

    All ranks call it.
    """
    if not isinstance(value, torch.nn.Parameter):
        return value
    from deepspeed.utils import safe_get_full_fp32_param

    if of_libraries.has_stepped_copy(value):
        return safe_get_full_fp32_param(value).detach().cpu()
    with GatheredParameters([value]):
        return value.detach().cpu().clone()


FOLDER = "pytorch_model"
# Plain records of DeepSpeed: they run nothing of their own as they are made.
_RECORDS = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


@dataclass
class EnginePiece(Piece):
    """The piece of a checkpoint that a DeepSpeed engine writes itself: models and optimizers.

    DeepSpeed's ranks communicate while they write. So ``prepare``, which all ranks call, writes
    everything, and nothing is left to write in the background.
    """

    engine: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def prepare(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=FOLDER, **self.options)


@dataclass(kw_only=True)
class DeepSpeedFiles(Format):
    """Models and optimizers that a DeepSpeed engine has written, or is to write.

    A training without DeepSpeed can read the weights, but not the optimizer's states. Each rank
    writes its parts of both::

        pytorch_model/   *_model_states.pt, *_optim_states.pt   DeepSpeed's own, by rank
        latest           holds the name "pytorch_model"
        zero_to_fp32.py  joins the weights, without this package

    DeepSpeed unpickles its files, which can run any code. So the files are checked first.
    """

    engine: Any = None

    def pieces(self, weights: Sequence[Any], optimizers: Sequence[Optimizer]) -> Iterator[Piece]:
        yield EnginePiece(engine=self.engine, options=self.options)

    def read_model(self, model: Module, folder: Path, index: int) -> dict[str, Any]:
        """Return the model's whole weights, in float32 if DeepSpeed kept them so."""
        if (folder / "model.safetensors").exists():  # by save_model
            return super().read_model(model, folder, index) or {}
        self.check_trust(folder)
        if not is_installed("deepspeed"):
            raise ConfigError(
                f"{folder} was written by DeepSpeed, which is needed to join its parts: pip "
                "install deepspeed ninja"
            )
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=FOLDER))

    def read_optimizer(self, optimizer: Optimizer, folder: Path, index: int) -> None:
        notice_once(
            "deepspeed optimizer",
            f"{folder} was written under DeepSpeed: its weights were read, and optimizers "
            "begin anew",
        )

    def check_trust(self, folder: Path) -> None:
        """Raise ``NotebookAccelError`` if unpickling DeepSpeed's files could run harmful code."""
        for path in sorted((folder / FOLDER).glob("*.pt")):
            try:
                named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            except Exception as error:
                raise NotebookAccelError(explain(path, error)) from error
            unknown = (name for name in named if name not in _RECORDS and not is_safe_name(name))
            if refused := sorted(unknown):
                raise NotebookAccelError(
                    f"{path} names {', '.join(refused)}, which is not read, since a file that "
                    "names it could run any code. If you trust the file, call "
                    "torch.serialization.add_safe_globals([...]) with it first"
                )


class DeepSpeedEngineWrapper:
    """Drives a DeepSpeed engine by the separate calls of a training loop.

    Attributes:
        engine: the ``deepspeed.DeepSpeedEngine``.
        is_due: whether there are gradients of a whole window that no step has used.
        step_was_skipped: whether the last step was skipped because a gradient overflowed.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.step_was_skipped = False
        self.is_due = False

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and reduce them over the ranks; all ranks call it."""
        self.engine.set_gradient_accumulation_boundary(sync_gradients)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self.is_due = sync_gradients

    def step(self) -> None:
        """Take the optimizer step, if all its batches are accumulated and it was not taken yet."""
        if self.is_due:
            self.is_due = False
            self.engine.step()
            # Not asked later: an engine that has read a checkpoint says that none was applied.
            self.step_was_skipped = not self.engine.was_step_applied()

    def drop_all(self) -> None:
        """Drop all gradients that no step has used, even while batches are being accumulated."""
        self.is_due = False
        optimizer = self.engine.optimizer
        optimizer.zero_grad()
        if self.engine.zero_optimization_stage() < 3:
            # Stages 1 and 2 add up a window in one of these, depending on version and precision;
            # `micro_step_id` counts its batches, for offloaded gradients. zero_grad resets none.
            for name in ("averaged_gradients", "all_grad_tensors"):
                sums = getattr(optimizer, name, {})
                for group in sums:
                    sums[group] = None
            if hasattr(optimizer, "micro_step_id"):
                optimizer.micro_step_id = -1

    def get_global_grad_norm(self) -> float:
        """Return the gradient norm of the last step, before clipping; 0 before the first step."""
        norm = self.engine.get_global_grad_norm()
        return 0.0 if norm is None else float(norm)


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer that ``prepare`` returns under DeepSpeed: its steps are steps of the engine.

    Args:
        optimizer: the optimizer that DeepSpeed steps.
        engine: the wrapper of the engine.
        accumulation: the state of gradient accumulation.
        device_memory: returns the memory of the device, or None if that is not known; shown in the
            live panel.

    Attributes:
        optimizer: the optimizer inside, which has this rank's shards of the weights.
    """

    def __init__(self, optimizer: Optimizer, engine: DeepSpeedEngineWrapper, **kwargs: Any) -> None:
        super().__init__(optimizer, False, **kwargs)
        self._engine = engine

    def _take_step(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            raise NotImplementedError(
                "DeepSpeed steps without a closure: call accelerator.backward(loss) and then "
                "optimizer.step()"
            )
        self._engine.step()
        self._overflow = self._engine.step_was_skipped
        self._num_skipped = self._num_skipped + self._overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a step that was not taken; keep those being accumulated."""
        if self._engine.is_due:
            self._engine.drop_all()

    def drop_gradients(self) -> None:
        self._engine.drop_all()


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """The scheduler that ``prepare`` returns for a ``DummyScheduler``; the engine moves it.

    Attributes:
        scheduler: DeepSpeed's scheduler, which advances with each step of the engine.
    """

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine's step has moved the scheduler already."""


def GatheredParameters(  # noqa: N802 (Accelerate's name)
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[Any]:
    """Return a context manager in which weights sharded by DeepSpeed's stage 3 are full tensors.

    For other weights it does nothing, so that code can use it under every strategy. All ranks enter
    it together.

    Args:
        params: one weight, or several.
        modifier_rank: the rank whose changes of the weights are kept, and sent to all ranks; None
            discards changes.
        fwd_module: passed to ``deepspeed.zero.GatheredParameters`` as its ``fwd_module``.
        enabled: False makes the context manager do nothing.
    """
    given = [params] if hasattr(params, "numel") else list(params)
    if not enabled or not any(hasattr(weight, "ds_id") for weight in given):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    block: AbstractContextManager[Any] = GatheredParameters(given, modifier_rank, fwd_module)
    return block
