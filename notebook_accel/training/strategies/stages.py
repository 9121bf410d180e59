"""Cuts a model into the stages of a pipeline. ``micro_batches`` runs batches through the stages.

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
import operator
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from notebook_accel.errors import ConfigError
from notebook_accel.training.models import ReplacedForward
from notebook_accel.training.settings.parallelism import ParallelismConfig
from notebook_accel.training.strategies.micro_batches import (
    SCHEDULES,
    Pipeline,
    StageEnds,
    weights_outside,
)

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


class _BlockForward(ReplacedForward):
    """A block's forward: runs, passes on what was received, or ends the stage."""

    def __init__(self, module: nn.Module, pipeline: Pipeline, index: int) -> None:
        super().__init__(module)
        self.pipeline = pipeline
        self.index = index

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


class _PipelinedForward(ReplacedForward):
    """A cut model's forward: runs all stages for evaluation, and is refused in training."""

    def __init__(self, module: nn.Module, pipeline: Pipeline) -> None:
        super().__init__(module)
        self.pipeline = pipeline

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
