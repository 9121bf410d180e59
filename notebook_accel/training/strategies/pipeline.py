"""Pipeline parallelism: each rank has some blocks of the model, and batches pass through the ranks.

The ranks of one pipeline read the same samples. There may be several pipelines
(``dp_replicate_size``, or ``dp_shard_size``, which also shards the weights of blocks). They read
different samples and average their gradients. ``tp_size`` ranks compute the layers of a stage
together::

    ParallelismConfig(pp_size=2, dp_replicate_size=2)      dp_replicate ->
                                                    pp  0: [ rank 0, rank 1 ]  first stages
                                                        1: [ rank 2, rank 3 ]  last stages

The blocks of a model (the children of an ``nn.Sequential``, the layers of a Transformers decoder)
are divided into stages. A rank keeps the blocks of its own stages and drops all others::

    rank 0    embed  block 0  block 1     -        -     norm  head
                                 '--hidden states--.
    rank 1    embed     -        -     block 2  block 3  norm  head

Every stage runs the model's own forward on the inputs, which all ranks of a pipeline have. Blocks
before the stage return the hidden states that the previous stage has sent, and the first block
after the stage ends the forward. So each rank computes masks, position embeddings and the like
itself, and only hidden states are sent between ranks.

Weights outside of the blocks (embeddings, norm, head) are on every rank. Each stage computes a part
of their gradients (often none), and the parts are summed before the step, so that the copies stay
equal and weights may be tied.

:class:`Pipeline` cuts a model and runs batches through its stages. ``PipelineParallel`` collects
weights, optimizer states and gradient norms from all stages for the rest of ``training``.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from notebook_accel.config.checks import too_old_torch
from notebook_accel.errors import ConfigError
from notebook_accel.training import collectives
from notebook_accel.training.collectives.nested import find_batch_size, leaves, recursively_apply
from notebook_accel.training.files import memory_of
from notebook_accel.training.models import ReplacedForward, local_part, set_within, weights_of
from notebook_accel.training.processes.random_numbers import get_random_states, set_random_states
from notebook_accel.training.settings.parallelism import ParallelismConfig
from notebook_accel.training.stepping.step_timer import step_timer
from notebook_accel.training.strategies import dtensors
from notebook_accel.training.strategies.base import (
    LossFunction,
    ModelToPrepare,
    Request,
    call_model,
)
from notebook_accel.training.strategies.mesh import MeshParallel, shared_weight

_Key = tuple[float, ...]


class PipelineParallel(MeshParallel):
    """Strategy for pipelines by ``torch.distributed.pipelining``.

    Each stage may in addition be sharded and divided over ranks, as ``MeshParallel`` does it. A
    weight is identified on all ranks by a key: the number of its model in the order of ``prepare``
    calls, and the position of the weight in the uncut model.
    """

    def __init__(self, request: Request) -> None:
        if too_old := too_old_torch((2, 11)):  # stages and gloo of 2.9 disagree on sizes
            raise ConfigError(f"pipelines: {too_old}")
        super().__init__(request)
        assert self.mesh is not None
        self._group = self.mesh["pp"].get_group()
        self._stage_index = self.mesh.get_local_rank("pp")
        self._has_users_plugin = "fsdp_plugin" in request.plugins
        # The key of every weight of a prepared model, kept on this rank or not, alike on every
        # rank: the number of the model, and the weight's place in it.
        self._keys = WeakIdKeyDictionary()
        self._num_prepared = 0  # counted, since ranks may forget models at different times

    @property
    def saves_shards(self) -> bool:
        # Whole files, unless the user's plugin wants every rank's parts.
        return self._has_users_plugin and super().saves_shards

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give the optimizer a placeholder for each weight that another stage has.

        So its state dict numbers the weights of all stages, alike on every rank. An optimizer that
        was made before ``prepare`` keeps their order. One that was made after it has this rank's
        weights alone: then those of all ranks are joined and sorted.
        """
        super().prepare_optimizer(optimizer)
        # A weight of no prepared model is known by its place in the optimizer.
        known: Any = self._keys
        mine: list[list[_Key]] = [
            [
                known.get(weight, (math.inf, number, index))
                for index, weight in enumerate(group["params"])
            ]
            for number, group in enumerate(optimizer.param_groups)
        ]
        of_stages: list[list[list[_Key]]] = collectives.gather_object([mine], group=self._group)
        if any(keys != mine for keys in of_stages):
            of_groups = zip(*of_stages, strict=True)
            for group, own, keys in zip(optimizer.param_groups, mine, of_groups, strict=True):
                weights = dict(zip(own, group["params"], strict=True))
                group["params"][:] = [
                    weights[key] if key in weights else self._elsewhere(key)
                    for key in sorted({*chain(*keys)})
                ]
        return optimizer

    def _elsewhere(self, key: _Key) -> nn.Parameter:
        """Return a placeholder, without elements, of a weight that another stage has."""
        placeholder = nn.Parameter(torch.empty(0, device=self.topology.device))
        self._keys[placeholder] = key
        return placeholder

    def prepare_model(self, given: ModelToPrepare) -> Module:
        if not given.training or self._is_spread(given.model):
            return super().prepare_model(given)
        model = given.model
        weights = dict(model.named_parameters())
        for name, weight in weights.items():
            # Each backward would add up what stages share once more, that of the other model too.
            if weight.requires_grad and weight in self._keys:
                raise shared_weight(model, name)
        number = self._num_prepared = self._num_prepared + 1
        note = partial(_name_all, [*model.state_dict()])
        model.register_state_dict_post_hook(note)  # type: ignore[no-untyped-call]
        keys = {name: (number, place) for place, name in enumerate(weights)}
        for name, weight in weights.items():
            self._keys[weight] = keys[name]
        model = super().prepare_model(given)
        kept = {id(weight) for weight in model.parameters()}
        for name, weight in model.named_parameters():
            if weight not in self._keys:  # made anew, of one on the meta device
                self._keys[weight] = keys[name]
        for weight in weights.values():
            if id(weight) not in kept and weight not in self._replaced:
                self._replaced[weight] = self._elsewhere(self._keys[weight])
        pipeline = pipeline_of(model)
        assert pipeline is not None
        # Now: sharding has replaced the weights of the cut model.
        outside = weights_outside(model, pipeline.prefix)
        pipeline.shared_weights = list(outside.values())
        pipeline.own_weights = [part for part in model.parameters() if id(part) not in outside]
        pipeline.sharded_blocks = [part for part in model.modules() if isinstance(part, FSDPModule)]
        return model

    def cut(self, model: Module) -> list[Module]:
        assert self.mesh is not None
        return Pipeline(model, self.mesh["pp"], self.parallelism, self.topology.device).blocks

    def forward_backward(
        self, model: Module, inputs: Any, targets: Any, loss_function: LossFunction, num_steps: int
    ) -> torch.Tensor:
        pipeline = pipeline_of(model)
        if pipeline is None:
            raise ConfigError(
                f"forward_backward() got a {type(model).__name__} that was not prepared for "
                "training: expected what accelerator.prepare(model) gave"
            )

        scaler = None if self.scaling is None else self.scaling.begin_backward()

        def for_backward(loss: torch.Tensor) -> torch.Tensor:
            loss = loss / num_steps
            return loss if scaler is None else scaler.scale(loss)

        if scaler is not None:
            # A scaler makes its scale when it is first used, which the last stage alone would do.
            scaler.scale(torch.zeros((), device=self.topology.device))
        if pipeline.has_added_up and self._stage_index:
            # Gradients that the loop kept were added up already, and count once.
            for weight in pipeline.shared_weights:
                weight.grad = None
        with step_timer().backward():  # and forward, in turn
            loss = pipeline.forward_backward(model, inputs, targets, loss_function, for_backward)
        pipeline.has_added_up = pipeline.exchanges_gradients
        if pipeline.exchanges_gradients:
            add_up_gradients(pipeline.shared_weights, self._group)
            if self.data_group.size > 1:
                assert self.data_group.process_group is not None
                # ``fully_shard`` averages the gradients of what it has sharded itself.
                own = [
                    weight
                    for weight in pipeline.own_weights
                    if not isinstance(weight, DTensor)
                    or "dp_shard" not in (weight.device_mesh.mesh_dim_names or ())
                ]
                weights = [*pipeline.shared_weights, *own]
                group, size = self.data_group.process_group, self.data_group.size
                add_up_gradients(weights, group, divide_by=size)
        return loss

    def backward(self, loss: torch.Tensor, num_steps: int = 1, **kwargs: Any) -> None:
        raise ConfigError(f"backward() was called: {PLAIN_LOOP}")

    def gradient_sync(self, model: Module, enabled: bool) -> AbstractContextManager[Any]:
        pipeline = pipeline_of(model)
        if pipeline is None:
            return super().gradient_sync(model, enabled)
        return set_within(pipeline, exchanges_gradients=enabled)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        weights = [weight for weight in parameters if weight.grad is not None]
        # What all stages have counts once.
        pipelines = filter(None, map(pipeline_of, self.spread))
        own = {id(weight) for pipeline in pipelines for weight in pipeline.own_weights}
        counted = [weight for weight in weights if id(weight) in own or not self._stage_index]
        norm = dtensors.total_grad_norm(counted, norm_type, self.topology.device).float()
        if norm_type == float("inf"):
            total: torch.Tensor = collectives.reduce(norm, "max", group=self._group)
        else:
            power = collectives.reduce(norm**norm_type, "sum", group=self._group)
            total = power ** (1 / norm_type)
        for group in dtensors.by_mesh(weights):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
        return total

    def state_dict(self, model: Module, *, full: bool, keeps: bool = True) -> dict[str, Any]:
        if not full or pipeline_of(model) is None:
            return super().state_dict(model, full=full, keeps=keeps)
        whole: dict[str, Any] = self.make_whole(model.state_dict())
        return whole if keeps else {}

    def buffers_elsewhere(self, model: Module) -> set[str]:
        pipeline, found = pipeline_of(model), super().buffers_elsewhere(model)
        if pipeline is None or len(pipeline.ranges) - 1 in pipeline.own_stages:
            return found
        # The rank of the last stage alone runs the model's forward to its end (see _join).
        prefix = pipeline.prefix
        return found | {name for name, _ in model.named_buffers() if not name.startswith(prefix)}

    def make_whole(self, values: Any) -> Any:
        # What a user saves by hand: accelerator.save(model.state_dict(), file). Its own values
        # count: it may be a copy of an earlier step, or of another type than the model.
        def join(state: Any) -> dict[str, Any]:
            joined = self._join(_whole_with_ties(state))
            return {name: joined[name] for name in getattr(state, _NAMES)}

        return recursively_apply(join, values, test_type=lambda value: hasattr(value, _NAMES))

    def optimizer_state(self, optimizer: Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        found = self.own_optimizer_state(optimizer)
        whole = recursively_apply(
            lambda value: dtensors.make_whole(value.detach()).cpu(), found["state"]
        )
        return {**found, "state": self._join(whole)}

    def own_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return _of_own_weights(optimizer, optimizer.state_dict())

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(optimizer, _of_own_weights(optimizer, state))

    def _join(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """Join the dictionaries of all stages; the last rank's value of a key is taken."""
        of_stages = collectives.gather_object([own], group=self._group)
        return {key: value for found in of_stages for key, value in found.items()}


def _of_own_weights(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict without the states of weights that another stage has.

    One that a user has loaded by hand may have brought them, and they are not stepped here.
    """
    own = dict(state["state"])
    for index, weight in enumerate(weights_of(optimizer)):
        if not weight.numel():
            own.pop(index, None)
    return {**state, "state": own}


# An attribute of a cut model's state dict: the names of the whole one.
_NAMES = "_notebook_accel_names"


def _name_all(names: list[str], _: Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Attach the uncut model's names to a state dict, for ``make_whole`` (a hook)."""
    if not prefix:
        setattr(state, _NAMES, names)


def _whole_with_ties(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return full tensors on the CPU, one object for a tied weight.

    All ranks of the stage call it.
    """
    seen: dict[Any, torch.Tensor] = {}
    found = dict(state)
    for name, value in state.items():
        if torch.is_tensor(value) and value.numel():
            key = memory_of(local_part(value))
            if key not in seen:
                seen[key] = dtensors.make_whole(value.detach()).cpu()
            found[name] = seen[key]
    return found


# The class of a schedule, and how many stages each rank has.
SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "1F1B": (Schedule1F1B, 1),
    "GPipe": (ScheduleGPipe, 1),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2),
}


def weights_outside(model: Module, prefix: str) -> dict[int, nn.Parameter]:
    """Return the weights of a model that are outside of its blocks, by ``id(weight)``.

    All ranks must list them in the same order, since they sum the gradients one by one. So weights
    are found by all their names: ``model.parameters()`` lists a tied weight by its first name,
    which only some ranks have.
    """
    return {
        id(weight): weight
        for name, weight in model.named_parameters(remove_duplicate=False)
        if not name.startswith(prefix)
    }


class StageEnds(BaseException):
    """Ends the model's forward after the last block of each stage but the final one.

    The first block after the stage raises it, and ``Pipeline`` catches it. It derives from
    ``BaseException``, so that an ``except Exception`` in the model does not catch it.
    """

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class Running:
    """The state of a stage's forward; ``received`` is None at the first stage."""

    blocks: range
    received: torch.Tensor | None
    seen: list[int] = field(default_factory=list)


@dataclass
class _MicroBatch:
    """A part of a batch, filled up to the common size by copies, which the loss ignores."""

    inputs: Any
    targets: Any
    size: int
    num_real: int


class Pipeline:
    """Runs batches through the stages of one model; all ranks of the pipeline call what runs it.

    A schedule of torch decides which stage runs which micro-batch when, and sends hidden states
    forward and their gradients back. Its input is only the index of each micro-batch: every rank
    has the full batch, and a stage runs the model's own forward on the inputs of a micro-batch. The
    replaced forwards of the blocks read in ``running`` whether their block is to run::

        schedule: stage 1, micro-batch 2, hidden states of stage 0
          -> _Stage.forward -> Pipeline.run: running = blocks of stage 1
          -> the model's forward, which raises StageEnds after the last of these blocks
          -> hidden states for stage 2; from the last stage, the loss

    Attributes:
        ranges: the blocks of each stage.
        blocks: the blocks that this rank keeps.
        exchanges_gradients: whether the next batch is the last of its window.
        has_added_up: whether all ranks of the pipeline have the same gradients of what they share.
        running: the stage whose forward runs now.
    """

    def __init__(
        self, model: Module, mesh: DeviceMesh, parallelism: ParallelismConfig, device: torch.device
    ) -> None:
        """Cut a model, in place, by replacing forwards: blocks of other ranks are dropped."""
        # Torch's schedule, made with the first batch, and the shapes that it was made for.
        self._kind, self._per_rank = SCHEDULES[parallelism.pp_schedule]
        self._built: Any = None
        self._built_for: Any = None
        num_stages = mesh.size() * self._per_rank
        self.own_stages = range(mesh.get_local_rank(), num_stages, mesh.size())
        self.num_microbatches = parallelism.num_microbatches or 2 * mesh.size()
        self.group, self.device = mesh.get_group(), device
        self.prefix, container = _find_blocks(model, num_stages)
        self.blocks_name = self.prefix.removesuffix(".") or type(model).__name__
        parts = [*container]
        for index, block in enumerate(parts):
            if any(block is other for other in parts[:index]):  # an activation, say
                parts[index] = copy.copy(block)
        ends = balance([_count_weights(block) for block in parts], num_stages)
        self.ranges = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        outside = weights_outside(model, self.prefix)
        children = container.named_modules(remove_duplicate=False)
        names = [self.prefix + name for name, _ in children if name and "." not in name]
        _refuse_shared_weights(names, parts, self.ranges, outside)
        kept = {index for stage in self.own_stages for index in self.ranges[stage]}
        self.blocks = [block for index, block in enumerate(parts) if index in kept]
        for index, block in enumerate(parts):
            container[index] = here = block if index in kept else _OnOtherStage(block)
            here.__dict__["forward"] = _BlockForward(here, self, index)
        model.__dict__["forward"] = _PipelinedForward(model, self)
        # What only this rank of the pipeline has, and what every rank has: set once it is sharded.
        self.own_weights: list[nn.Parameter] = []
        self.shared_weights: list[nn.Parameter] = []
        self.sharded_blocks: list[FSDPModule] = []
        self.exchanges_gradients = True
        self.has_added_up = False
        self.running: Running | None = None
        # Of the batch that is under way: its parts, and what turns the last stage's outputs for one
        # of them, by its number, into what backward begins with.
        self.micro_batches: list[_MicroBatch] = []
        self.end: Callable[[int, Any], torch.Tensor] | None = None

    def forward_backward(
        self,
        model: Module,
        inputs: Any,
        targets: Any,
        loss_function: LossFunction,
        for_backward: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Run forward, loss and backward of one batch, micro-batch by micro-batch.

        All ranks of the pipeline call it, with the same batch.

        Args:
            targets: second argument of ``loss_function``, for the full batch.
        """
        losses: dict[int, torch.Tensor] = {}

        def end(number: int, outputs: Any) -> torch.Tensor:
            batch = self.micro_batches[number]
            if batch.num_real:
                if batch.num_real < batch.size:
                    outputs = _take(outputs, batch.size, slice(batch.num_real))
                total = sum(each.num_real for each in self.micro_batches)
                loss = loss_function(outputs, batch.targets) * (batch.num_real / total)
            else:
                # Nothing, but backward must run through all stages. No number is multiplied by 0:
                # an infinite one (of a mask) would give NaN.
                tensors = [part for part in leaves(outputs) if isinstance(part, torch.Tensor)]
                nothing = (part.flatten()[:0].sum() for part in tensors if part.requires_grad)
                loss = sum(nothing, torch.zeros((), device=self.device))
            losses[number] = loss.detach()
            return for_backward(loss)

        with set_within(self, micro_batches=self._divide(inputs, targets), end=end):
            # Which micro-batch a stage runs; the batch itself each rank has.
            numbers = torch.arange(self.num_microbatches)
            first = (numbers,) if 0 in self.own_stages else ()
            self._schedule_for(model).step(
                *first, number=numbers, target=numbers, return_outputs=False
            )
            loss, last = torch.zeros((), device=self.device), len(self.ranges) - 1
            if last in self.own_stages:
                loss += torch.stack([*losses.values()]).sum()
        dist.broadcast(loss, group=self.group, group_src=last % self.group.size())
        return loss

    def _divide(self, inputs: Any, targets: Any) -> list[_MicroBatch]:
        size = find_batch_size(inputs)
        if not size:
            raise ConfigError(
                "forward_backward divides a batch into micro-batches, and found no tensor with a "
                f"sample in the inputs ({type(inputs).__name__}): expected tensors whose first "
                "dimension is the batch's"
            )
        width = math.ceil(size / self.num_microbatches)
        found = []
        for start in range(0, width * self.num_microbatches, width):
            end = start + width
            num_real = min(max(size - start, 0), width)
            real = slice(start, end)  # costs no copy
            filled = real if end <= size else [min(index, size - 1) for index in range(start, end)]
            own_inputs, own_targets = _take(inputs, size, filled), _take(targets, size, real)
            found.append(_MicroBatch(own_inputs, own_targets, width, num_real))
        return found

    def _schedule_for(self, model: Module) -> Any:
        """Return torch's schedule for a batch; new shapes need a new one, which fixes them."""
        shapes = [
            (tuple(part.shape), part.dtype)
            for part in leaves(self.micro_batches[0].inputs)
            if isinstance(part, torch.Tensor)
        ]
        if self._built is None or self._built_for != shapes:
            stages = [
                PipelineStage(
                    _Stage(self, model, index),
                    index,
                    len(self.ranges),
                    self.device,
                    group=self.group,
                )
                for index in self.own_stages
            ]
            self._built = self._kind(
                stages if self._per_rank > 1 else stages[0],
                n_microbatches=self.num_microbatches,
                loss_fn=lambda loss, _: loss,  # the last stage gives the loss itself
                scale_grads=False,
            )
            self._built_for = shapes
        return self._built

    def run(self, stage: int, received: torch.Tensor | None, forward: Callable[[], Any]) -> Any:
        """Run the forward of a stage; ``received`` is None at stage 0."""
        is_last = stage == len(self.ranges) - 1
        running = self.running = Running(self.ranges[stage], received)
        outputs = None
        try:
            outputs = forward()
            ended = is_last
        except StageEnds as end:
            outputs, ended = end.hidden, True
        finally:
            self.running = None
        if not ended or running.seen != list(running.blocks):
            raise ConfigError(
                f"stage {stage} of the pipeline has blocks {list(running.blocks)} of "
                f"{self.blocks_name}, and the forward ran {running.seen} of them: expected a model "
                "that runs all its blocks once, one after the other"
            )
        if not is_last and not isinstance(outputs, torch.Tensor):
            raise ConfigError(
                f"the blocks of {self.blocks_name} pass a {type(outputs).__name__} on: expected "
                "blocks that take hidden states (one tensor) as first argument and give them"
            )
        return outputs

    def evaluate(self, forward: Callable[[], Any]) -> Any:
        """Run all stages without backward; all ranks call it, and get the outputs."""
        outputs = None
        for stage in range(len(self.ranges)):
            owner = dist.get_global_rank(self.group, stage % self.group.size())
            if stage in self.own_stages:
                outputs = self.run(stage, outputs, forward)
            outputs = self._spread(outputs, owner)
        return outputs

    def _spread(self, values: Any, source: int) -> Any:
        """Broadcast nested tensors of global rank ``source``; all ranks of the pipeline call it."""
        form = [recursively_apply(lambda part: part.to("meta"), values)]
        collectives.broadcast_object_list(form, source, group=self.group)
        if dist.get_rank() != source:
            values = recursively_apply(
                lambda part: torch.empty_like(part, device=self.device), form[0]
            )
        return recursively_apply(
            lambda part: collectives.broadcast(part.contiguous(), source, group=self.group), values
        )


def _take(values: Any, size: int, samples: slice | list[int]) -> Any:
    """Return some samples; tensors whose first dimension is not ``size`` are returned unchanged."""
    return recursively_apply(
        lambda part: part[samples] if part.ndim and len(part) == size else part, values
    )


class _Stage(Module):
    """The module of one stage: the model's forward with these blocks alone."""

    def __init__(self, pipeline: Pipeline, model: Module, index: int) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.model = model
        self.index = index
        self.is_trial = True

    def forward(self, given: torch.Tensor, *, number: torch.Tensor) -> Any:
        pipeline, index = self.pipeline, int(number)
        model: Callable[..., Any] = self.model
        # Torch runs a stage once more, to learn the shapes: running averages and random numbers
        # must not see it, or a resumed training would part from one that was never stopped.
        is_trial, self.is_trial = self.is_trial, False
        if is_trial:
            states = get_random_states(pipeline.device)
            copies = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            model = lambda *args, **kwargs: functional_call(self.model, copies, args, kwargs)  # noqa: E731
        inputs = pipeline.micro_batches[index].inputs
        # Stage 0 has nothing to receive: ``given`` is the number of its micro-batch again.
        received = given if self.index else None
        outputs = pipeline.run(self.index, received, lambda: call_model(model, inputs))
        if self.index == len(pipeline.ranges) - 1:
            assert pipeline.end is not None
            outputs = pipeline.end(index, outputs)
        if is_trial:
            set_random_states(states, pipeline.device)
        elif outputs.requires_grad and pipeline.sharded_blocks:
            # Of the micro-batches, whose backwards run in this order, only the last one reduces the
            # gradients of blocks in parts, and while a window is open none. (Torch's stage does so
            # for a module that is in parts as a whole.)
            is_last = index == pipeline.num_microbatches - 1 and pipeline.exchanges_gradients

            def set_reducing(_: torch.Tensor) -> None:
                for block in pipeline.sharded_blocks:
                    block.set_requires_gradient_sync(is_last, recurse=False)

            outputs.register_hook(set_reducing)
        return outputs


def add_up_gradients(
    weights: Sequence[nn.Parameter], group: dist.ProcessGroup, divide_by: int = 1
) -> None:
    """Sum the weights' gradients over a group; None on all ranks stays None. All ranks call it."""
    weights = [weight for weight in weights if weight.requires_grad]
    if not weights:
        return
    device = weights[0].device  # of all: a rank computes on one
    is_used = torch.tensor([float(weight.grad is not None) for weight in weights], device=device)
    dist.all_reduce(is_used, dist.ReduceOp.MAX, group=group)
    used = [weight for weight, flag in zip(weights, is_used.tolist(), strict=True) if flag]
    for weight in used:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    # Of a weight in parts (tensor parallelism) each rank has the same part as its peers.
    own = [local_part(weight.grad) for weight in used if weight.grad is not None]
    sums = [part.contiguous() for part in own]
    for work in [dist.all_reduce(part, group=group, async_op=True) for part in sums]:
        work.wait()
    with torch.no_grad():
        for part, total in zip(own, sums, strict=True):
            part.copy_(total.div_(divide_by) if divide_by > 1 else total)


PLAIN_LOOP = (
    "a pipeline (pp_size > 1) runs forward, loss and backward together: in place of "
    "model(inputs), a loss and accelerator.backward(loss), call "
    "accelerator.forward_backward(model, inputs, targets, loss_function); to evaluate, call "
    "model.eval() first, or call the model under torch.no_grad()"
)


def pipeline_of(model: Module) -> Pipeline | None:
    """Return the :class:`Pipeline` of a model that was cut into stages; None for other models."""
    forward = model.__dict__.get("forward")
    return forward.pipeline if isinstance(forward, _PipelinedForward) else None


class _OnOtherStage(Module):
    """Placeholder for a block that another rank has: it has the block's attributes, no weights."""

    def __init__(self, block: Module) -> None:
        super().__init__()
        # A decoder may ask a layer for its kind (Transformers: attention_type) before it calls it.
        plain = {key: value for key, value in vars(block).items() if not key.startswith("_")}
        self.__dict__.update({key: value for key, value in plain.items() if key != "forward"})
        self.register_load_state_dict_pre_hook(_take_nothing)  # type: ignore[no-untyped-call]


def _take_nothing(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:  # noqa: ARG001
    """Remove another rank's block from a state dict, so that an uncut model's weights load."""
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


@dataclass(eq=False, repr=False)
class _BlockForward(ReplacedForward):
    """A block's forward: runs, passes on what was received, or ends the stage."""

    pipeline: Pipeline
    index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = self.pipeline.running
        # None: backward computes a forward again (activation checkpointing).
        if running is None or self.index in running.blocks:
            if running is not None:
                running.seen.append(self.index)
            return self.plain(*args, **kwargs)
        if self.index < running.blocks.start:
            # A copy: a block may change in place what it is given, and torch refuses that for
            # a tensor whose gradient is sent back.
            return None if running.received is None else running.received.clone()
        raise StageEnds(args[0] if args else next(iter(kwargs.values()), None))


@dataclass(eq=False, repr=False)
class _PipelinedForward(ReplacedForward):
    """A cut model's forward: runs all stages for evaluation, and is refused in training."""

    pipeline: Pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.pipeline.running is not None:
            return self.plain(*args, **kwargs)
        if self.module.training and torch.is_grad_enabled():
            raise ConfigError(f"{type(self.module).__name__} was called in training: {PLAIN_LOOP}")
        with torch.no_grad():
            return self.pipeline.evaluate(lambda: self.module(*args, **kwargs))


def _count_weights(module: Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _find_blocks(model: Module, num_stages: int) -> tuple[str, nn.ModuleList | nn.Sequential]:
    """Find the list of blocks: the ``ModuleList`` or ``Sequential`` with the most weights."""
    found = [
        (f"{name}." if name else "", part)
        for name, part in model.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) >= num_stages
    ]
    if not found:
        raise ConfigError(
            f"a pipeline of {num_stages} stages takes one block or more a stage, and "
            f"{type(model).__name__} has no nn.Sequential or nn.ModuleList of {num_stages} or more "
            "blocks: lower pp_size, use dp_shard_size, or write the model as an nn.Sequential"
        )
    if isinstance(model, nn.Sequential) and found[0][1] is model:
        return found[0]
    # Of one list inside another the outer one is named first, and max takes the first.
    return max(found, key=lambda each: _count_weights(each[1]))


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """Divide consecutive blocks into stages, such that the largest cost of a stage is minimal."""

    @cache
    def divide(start: int, stages: int) -> tuple[int, tuple[int, ...]]:
        if stages == 1:
            return sum(costs[start:]), (len(costs),)
        choices = []
        # From the back: of equal choices the first stages get more, as the last has the head.
        for end in range(len(costs) - stages + 1, start, -1):
            largest, ends = divide(end, stages - 1)
            choices.append((max(sum(costs[start:end]), largest), (end, *ends)))
        return min(choices, key=operator.itemgetter(0))

    return list(divide(0, num_stages)[1])


def _refuse_shared_weights(
    names: Sequence[str],
    blocks: Sequence[Module],
    ranges: Sequence[range],
    outside: Collection[int],
) -> None:
    """Refuse a model that has one weight in the blocks of two stages."""
    stages = [stage for stage, indices in enumerate(ranges) for _ in indices]
    seen: dict[int, tuple[int, str]] = {}
    for stage, name, block in zip(stages, names, blocks, strict=True):
        for inner, weight in block.named_parameters(name):
            first, other = seen.setdefault(id(weight), (stage, inner))
            if first != stage and id(weight) not in outside:
                raise ConfigError(
                    f"{other!r} and {inner!r} are one weight, and the pipeline puts them into "
                    f"stages {first} and {stage}: expected blocks without weights in common; "
                    "lower pp_size, or use dp_shard_size"
                )
