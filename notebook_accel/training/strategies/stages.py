"""Cuts a model into the stages of a pipeline, and runs batches through them.

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
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
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
from torch.func import functional_call

from notebook_accel.errors import ConfigError
from notebook_accel.training import collectives
from notebook_accel.training.collectives.nested import find_batch_size, leaves, recursively_apply
from notebook_accel.training.models import ReplacedForward, set_within
from notebook_accel.training.processes.random_numbers import get_random_states, set_random_states
from notebook_accel.training.settings.parallelism import ParallelismConfig
from notebook_accel.training.strategies.dtensors import local_part
from notebook_accel.training.strategies.strategy_request import LossFunction, call_model

# The class of a schedule, and how many stages each rank has.
SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "1F1B": (Schedule1F1B, 1),
    "GPipe": (ScheduleGPipe, 1),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2),
}


def weights_outside(model: nn.Module, prefix: str) -> dict[int, nn.Parameter]:
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
    is_last: bool
    received: torch.Tensor | None
    seen: list[int] = field(default_factory=list)


@dataclass
class _MicroBatch:
    """A part of a batch, filled up to the common size by copies, which the loss ignores."""

    inputs: Any
    targets: Any
    size: int
    num_real: int


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """Runs batches through the stages of one model; all ranks of the pipeline call what runs it.

    A schedule of torch decides which stage runs which micro-batch when, and sends hidden states
    forward and their gradients back. Its input is only the index of each micro-batch: every rank
    has the full batch, and a stage runs the model's own forward on the inputs of a micro-batch. The
    replaced forwards of the blocks read in ``running`` whether their block is to run::

        schedule: stage 1, micro-batch 2, hidden states of stage 0
          -> _Stage.forward -> Pipeline.run_micro_batch: running = blocks of stage 1
          -> the model's forward, which raises StageEnds after the last of these blocks
          -> hidden states for stage 2; from the last stage, the loss
    """

    schedule: str
    """Its name in ``SCHEDULES``."""
    ranges: Sequence[range]
    """The blocks of each stage."""
    own_stages: range
    """The stages of this rank."""
    num_microbatches: int
    group: dist.ProcessGroup
    """The ranks of one pipeline."""
    device: torch.device
    """Where this rank computes."""
    prefix: str
    """How the names of blocks begin."""
    blocks_name: str
    """What messages call the blocks."""
    own_weights: list[nn.Parameter] = field(default_factory=list, init=False)
    """Weights that only this rank of the pipeline has; empty until ``note_weights``."""
    shared_weights: list[nn.Parameter] = field(default_factory=list, init=False)
    """Weights that every rank of the pipeline has, likewise."""
    sharded_blocks: list[FSDPModule] = field(default_factory=list, init=False)
    """Modules of this rank whose weights are in parts, likewise."""
    exchanges_gradients: bool = field(default=True, init=False)
    """Whether the next batch is the last of its window."""
    has_added_up: bool = field(default=False, init=False)
    """Whether all ranks of the pipeline have the same gradients of what they share."""
    running: Running | None = field(default=None, init=False)
    """The stage whose forward runs now."""
    # Of the batch that is under way: its parts, and what turns the last stage's outputs for one of
    # them, by its number, into what backward begins with.
    _micro_batches: list[_MicroBatch] = field(default_factory=list, init=False)
    _end: Callable[[int, Any], torch.Tensor] | None = field(default=None, init=False)
    # Torch's schedule, and the shapes that it was made for.
    _built: Any = field(default=None, init=False)
    _built_for: Any = field(default=None, init=False)

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage, which computes the model's outputs."""
        return len(self.ranges) - 1 in self.own_stages

    def note_weights(self, model: nn.Module) -> None:
        """Set the three kinds of weights from the cut model, after sharding has replaced them."""
        outside = weights_outside(model, self.prefix)
        self.shared_weights = list(outside.values())
        self.own_weights = [part for part in model.parameters() if id(part) not in outside]
        self.sharded_blocks = [part for part in model.modules() if isinstance(part, FSDPModule)]

    def forward_backward(
        self,
        model: nn.Module,
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
            loss = self._mean_loss(outputs, self._micro_batches[number], loss_function)
            losses[number] = loss.detach()
            return for_backward(loss)

        with set_within(self, _micro_batches=self._divide(inputs, targets), _end=end):
            # Which micro-batch a stage runs; the batch itself each rank has.
            numbers = torch.arange(self.num_microbatches)
            first = (numbers,) if 0 in self.own_stages else ()
            self._schedule_for(model).step(
                *first, number=numbers, target=numbers, return_outputs=False
            )
            loss = torch.zeros((), device=self.device)
            if self.has_last_stage:
                loss += torch.stack([*losses.values()]).sum()
        dist.broadcast(loss, src=self._rank_of(len(self.ranges) - 1), group=self.group)
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

    def _schedule_for(self, model: nn.Module) -> Any:
        """Return torch's schedule for a batch; new shapes need a new one, which fixes them."""
        shapes = [
            (tuple(part.shape), part.dtype)
            for part in leaves(self._micro_batches[0].inputs)
            if isinstance(part, torch.Tensor)
        ]
        if self._built is None or self._built_for != shapes:
            stages = [
                _StageWithShards(
                    self,
                    _Stage(self, model, index),
                    index,
                    len(self.ranges),
                    self.device,
                    group=self.group,
                )
                for index in self.own_stages
            ]
            kind, per_rank = SCHEDULES[self.schedule]
            self._built = kind(
                stages if per_rank > 1 else stages[0],
                n_microbatches=self.num_microbatches,
                loss_fn=lambda loss, _: loss,  # the last stage gives the loss itself
                scale_grads=False,
            )
            self._built_for = shapes
        return self._built

    def run_micro_batch(
        self, model: Callable[..., Any], stage: int, number: int, received: torch.Tensor | None
    ) -> Any:
        """Run the forward of a stage; ``received`` is None at stage 0."""
        inputs = self._micro_batches[number].inputs
        outputs = self._run(stage, received, lambda: call_model(model, inputs))
        assert self._end is not None
        return outputs if stage < len(self.ranges) - 1 else self._end(number, outputs)

    def _mean_loss(
        self, outputs: Any, batch: _MicroBatch, loss_function: LossFunction
    ) -> torch.Tensor:
        """Return a micro-batch's share of the mean loss; without real samples a 0 with a graph."""
        if not batch.num_real:
            tensors = [part for part in leaves(outputs) if isinstance(part, torch.Tensor)]
            # Nothing, but backward must run through all stages. No number is multiplied by 0:
            # an infinite one (of a mask) would give NaN.
            nothing = (part.flatten()[:0].sum() for part in tensors if part.requires_grad)
            return sum(nothing, torch.zeros((), device=self.device))
        if batch.num_real < batch.size:
            outputs = _take(outputs, batch.size, slice(batch.num_real))
        total = sum(each.num_real for each in self._micro_batches)
        return loss_function(outputs, batch.targets) * (batch.num_real / total)

    def _run(self, stage: int, received: torch.Tensor | None, forward: Callable[[], Any]) -> Any:
        is_last = stage == len(self.ranges) - 1
        running = self.running = Running(self.ranges[stage], is_last, received)
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
            owner = self._rank_of(stage)
            if stage in self.own_stages:
                outputs = self._run(stage, outputs, forward)
            outputs = self._spread(outputs, owner)
        return outputs

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage % dist.get_world_size(self.group))

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


class _StageWithShards(PipelineStage):
    """A ``PipelineStage`` whose sharded blocks reduce their gradients once per batch.

    Torch's class delays the reduction only if ``fully_shard`` was called on the stage module. Here
    it was called on the blocks inside, which would reduce gradients for every micro-batch. While
    batches accumulate, nothing is reduced.
    """

    def __init__(self, pipeline: Pipeline, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pipeline = pipeline
        self.num_done = 0

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        # Counted here: what torch calls the last backward depends on the schedule.
        self.num_done = self.num_done % self.pipeline.num_microbatches + 1
        is_last = self.num_done == self.pipeline.num_microbatches
        for block in self.pipeline.sharded_blocks:
            block.set_requires_gradient_sync(
                is_last and self.pipeline.exchanges_gradients, recurse=False
            )
        super().backward_one_chunk(*args, **kwargs)


class _Stage(nn.Module):
    """The module of one stage: the model's forward with these blocks alone."""

    def __init__(self, pipeline: Pipeline, model: nn.Module, index: int) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.model = model
        self.index = index
        self.is_trial = True

    def forward(self, given: torch.Tensor, *, number: torch.Tensor) -> Any:
        # Stage 0 has nothing to receive: ``given`` is the number of its micro-batch again.
        received = given if self.index else None
        if not self.is_trial:
            return self.pipeline.run_micro_batch(self.model, self.index, int(number), received)
        # Torch runs a stage once more, to learn the shapes: running averages and random numbers
        # must not see it, or a resumed training would part from one that was never stopped.
        self.is_trial = False
        states = get_random_states(self.pipeline.device)
        copies = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

        def on_copies(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self.model, copies, args, kwargs)

        outputs = self.pipeline.run_micro_batch(on_copies, self.index, int(number), received)
        set_random_states(states, self.pipeline.device)
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


def cut(
    model: nn.Module, mesh: DeviceMesh, parallelism: ParallelismConfig, device: torch.device
) -> list[nn.Module]:
    """Cut a model into stages, in place, by replacing forwards: other ranks' blocks are dropped."""
    num_stages = mesh.size() * SCHEDULES[parallelism.pp_schedule][1]
    prefix, container = _find_blocks(model, num_stages)
    parts = _list_blocks(container)
    ends = balance([_count_weights(block) for _, block in parts], num_stages)
    ranges = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    _refuse_shared_weights(prefix, parts, ranges, weights_outside(model, prefix).keys())
    own_stages = range(mesh.get_local_rank(), num_stages, mesh.size())
    pipeline = Pipeline(
        schedule=parallelism.pp_schedule,
        ranges=ranges,
        own_stages=own_stages,
        num_microbatches=parallelism.num_microbatches or 2 * mesh.size(),
        group=mesh.get_group(),
        device=device,
        prefix=prefix,
        blocks_name=prefix.removesuffix(".") or type(model).__name__,
    )
    kept = {index for stage in own_stages for index in ranges[stage]}
    for index, (name, block) in enumerate(parts):
        here = block if index in kept else _OnOtherStage(block)
        setattr(container, name, here)
        here.__dict__["forward"] = _BlockForward(here, pipeline, index)
    model.__dict__["forward"] = _PipelinedForward(model, pipeline)
    return [block for index, (_, block) in enumerate(parts) if index in kept]


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the :class:`Pipeline` of a model that was cut into stages; None for other models."""
    forward = model.__dict__.get("forward")
    return forward.pipeline if isinstance(forward, _PipelinedForward) else None


class _OnOtherStage(nn.Module):
    """Placeholder for a block that another rank has: it has the block's attributes, no weights."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # A decoder may ask a layer for its kind (Transformers: attention_type) before it calls it.
        plain = {key: value for key, value in vars(block).items() if not key.startswith("_")}
        self.__dict__.update({key: value for key, value in plain.items() if key != "forward"})
        self.register_load_state_dict_pre_hook(_take_nothing)  # type: ignore[no-untyped-call]


def _take_nothing(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:  # noqa: ARG001
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


def _count_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _find_blocks(model: nn.Module, num_stages: int) -> tuple[str, nn.Module]:
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


def _list_blocks(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, block) of each child; one that is a child twice is copied."""
    blocks: list[tuple[str, nn.Module]] = []
    for name, block in container.named_modules(remove_duplicate=False):
        if not name or "." in name:
            continue
        is_known = any(block is known for _, known in blocks)
        blocks.append((name, copy.copy(block) if is_known else block))
    return blocks


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
    prefix: str,
    blocks: Sequence[tuple[str, nn.Module]],
    ranges: Sequence[range],
    outside: Collection[int],
) -> None:
    """Refuse a model that has one weight in the blocks of two stages."""
    seen: dict[int, tuple[int, str]] = {}
    for stage, indices in enumerate(ranges):
        for index in indices:
            name, block = blocks[index]
            for inner, weight in block.named_parameters():
                full = f"{prefix}{name}.{inner}"
                first, other = seen.setdefault(id(weight), (stage, full))
                if first != stage and id(weight) not in outside:
                    raise ConfigError(
                        f"{other!r} and {full!r} are one weight, and the pipeline puts them into "
                        f"stages {first} and {stage}: expected blocks without weights in common; "
                        "lower pp_size, or use dp_shard_size"
                    )
