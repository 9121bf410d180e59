"""Wrappers by which the usual training loop drives DeepSpeed's engine.

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

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from notebook_accel.training.models import set_within
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer, AcceleratedScheduler

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "GatheredParameters",
]


class DeepSpeedEngineWrapper:
    """Drives a DeepSpeed engine by the separate calls of a training loop.

    Attributes:
        engine: the ``deepspeed.DeepSpeedEngine``.
        step_was_skipped: whether the last step was skipped because a gradient overflowed.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.step_was_skipped = False
        # Whether there are gradients of a whole window that no step has used.
        self._is_due = False

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and reduce them over the ranks; all ranks call it."""
        self.engine.set_gradient_accumulation_boundary(sync_gradients)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self._is_due = sync_gradients

    def clip_and_step(self, max_norm: float) -> float:
        """Step, clipped, if a step is due; return the newest unclipped norm. All ranks call it."""
        if self._is_due:
            with set_within(self.engine.optimizer, clip_grad=max_norm):
                self.step()
        return self.get_global_grad_norm()

    def step(self) -> None:
        """Take the optimizer step, if all its batches are accumulated and it was not taken yet."""
        if self._is_due:
            self._is_due = False
            self.engine.step()
            # Not asked later: an engine that has read a checkpoint says that none was applied.
            self.step_was_skipped = not self.engine.was_step_applied()

    def drop(self) -> None:
        """Drop the gradients of a step that was not taken; keep those being accumulated."""
        if self._is_due:
            self.drop_all()

    def drop_all(self) -> None:
        """Drop all gradients that no step has used, even while batches are being accumulated."""
        self._is_due = False
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
        self._engine.drop()

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
