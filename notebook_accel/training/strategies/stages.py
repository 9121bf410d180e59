"""Stages of a pipeline: how a model is cut. How a batch goes through them is in ``micro_batches``.

The blocks of a model (the children of an ``nn.Sequential``, the layers of a Transformers decoder)
are divided into stages; a rank keeps the blocks of its stages and drops the others'::

    rank 0    embed  block 0  block 1     -        -     norm  head
                                 '--hidden states--.
    rank 1    embed     -        -     block 2  block 3  norm  head

Every stage runs the model's own forward on the inputs, which all ranks of a pipeline have. Blocks
before the stage are skipped and give what the stage before has sent, and the first block after it
ends the forward. So masks, position embeddings and the like are computed where they are used, and
only the hidden states travel.

What is outside of the blocks is on every rank. Each stage computes its share of those weights'
gradients (often none), which are added up before the step: tied embeddings and heads stay one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from notebook_accel.errors import ConfigError
from notebook_accel.training.models import ReplacedForward, forward_of
from notebook_accel.training.strategies import blocks
from notebook_accel.training.strategies.micro_batches import (
    SCHEDULES,
    Pipeline,
    StageEnds,
    weights_outside,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from notebook_accel.training.settings.parallelism import ParallelismConfig

__all__ = ["PLAIN_LOOP", "cut", "pipeline_of"]

PLAIN_LOOP = (
    "a pipeline (pp_size > 1) runs forward, loss and backward together: in place of "
    "model(inputs), a loss and accelerator.backward(loss), call "
    "accelerator.forward_backward(model, inputs, targets, loss_function); to evaluate, call "
    "model.eval() first, or call the model under torch.no_grad()"
)


def cut(
    model: nn.Module, mesh: DeviceMesh, parallelism: ParallelismConfig, device: torch.device
) -> list[nn.Module]:
    """Cut a model into stages, in place: this rank keeps its blocks, and what is outside of them.

    Args:
        model: whole and alike on every rank.
        mesh: the ranks of one pipeline, one dimension.
        parallelism: the schedule, and the number of micro-batches.
        device: where this rank computes.

    Returns:
        the blocks that this rank keeps.

    Raises:
        ConfigError: the model has not enough blocks, or two stages share a weight.
    """
    num_stages = mesh.size() * SCHEDULES[parallelism.pp_schedule][1]
    prefix, container = blocks.find(model, num_stages)
    parts = blocks.list_of(container)
    ends = blocks.balance([blocks.count_weights(block) for _, block in parts], num_stages)
    ranges = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    blocks.refuse_shared_weights(prefix, parts, ranges, weights_outside(model, prefix).keys())
    own_stages = range(mesh.get_local_rank(), num_stages, mesh.size())
    pipeline = Pipeline(
        schedule=parallelism.pp_schedule,
        ranges=ranges,
        own_stages=own_stages,
        num_microbatches=parallelism.num_microbatches or 2 * mesh.size(),
        group=mesh.get_group(),
        device=device,
        prefix=prefix,
        model_name=type(model).__name__,
    )
    kept = {index for stage in own_stages for index in ranges[stage]}
    for index, (name, block) in enumerate(parts):
        here = block if index in kept else _OnOtherStage(block)
        setattr(container, name, here)
        here.__dict__["forward"] = _BlockForward(here, pipeline, index)
    model.__dict__["forward"] = _PipelinedForward(model, pipeline)
    return [block for index, (_, block) in enumerate(parts) if index in kept]


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """The pipeline that a prepared model goes through; None for a model that was not cut."""
    forward = model.__dict__.get("forward")
    return forward.pipeline if isinstance(forward, _PipelinedForward) else None


class _OnOtherStage(nn.Module):
    """Stands for a block of another stage: its plain attributes, and no weights."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # A decoder may ask a layer for its kind (Transformers: attention_type) before it calls it.
        plain = {key: value for key, value in vars(block).items() if not key.startswith("_")}
        self.__dict__.update({key: value for key, value in plain.items() if key != "forward"})

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Take nothing and miss nothing, so that whole weights load into a model with gaps."""


class _BlockForward(ReplacedForward):
    """The forward of one block, which knows whether the block belongs to the stage that runs."""

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

    def __reduce__(self) -> tuple[Any, ...]:
        return (forward_of, (self.module, self.replaced))


class _PipelinedForward(ReplacedForward):
    """What the user calls: the outputs of the whole pipeline, on each of its ranks."""

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

    def __reduce__(self) -> tuple[Any, ...]:
        return (forward_of, (self.module, self.replaced))
