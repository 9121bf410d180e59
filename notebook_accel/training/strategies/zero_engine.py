"""DeepSpeed's engine, and what a loop steps and moves instead of its own optimizer and scheduler.

DeepSpeed clips, unscales, steps and clears in one call of its engine::

    accelerator.backward(loss)      engine.backward: gradients, reduced over the ranks
    accelerator.clip_grad_norm_()   engine.step, clipping: DeepSpeed knows the norm there alone
    optimizer.step()                engine.step, unless the clipping has taken it
    optimizer.zero_grad()           nothing, after a step; a whole window that no step used is
                                    dropped, an open one stays
    scheduler.step()                nothing where the engine moves its own scheduler
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.rank import current
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer
from notebook_accel.training.stepping.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch.nn import Module
    from torch.optim import Optimizer

    from notebook_accel.training.stepping.accumulation import Accumulation

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "GatheredParameters",
]


class DeepSpeedEngineWrapper:
    """Takes an engine of DeepSpeed through the steps of a loop.

    Attributes:
        engine: the ``deepspeed.DeepSpeedEngine``.
        step_was_skipped: whether the last step was left out because a gradient overflowed.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.step_was_skipped = False
        # Whether there are gradients of a whole window that no step has used.
        self._is_due = False

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and reduce them over the ranks.

        Args:
            loss: divided by the batches of its window already.
            sync_gradients: whether it is the last of its window.
            **kwargs: further arguments of the engine's ``backward``.
        """
        self.engine.set_gradient_accumulation_boundary(sync_gradients)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self._is_due = sync_gradients

    def clip_and_step(self, max_norm: float) -> float:
        """Step with gradients clipped to a norm; gives the norm before.

        Without gradients of a whole window nothing happens, and the norm is the last one.
        """
        if self._is_due:
            optimizer = self.engine.optimizer
            before, optimizer.clip_grad = optimizer.clip_grad, max_norm
            try:
                self.step()
            finally:
                optimizer.clip_grad = before
        return self.get_global_grad_norm()

    def step(self) -> None:
        """Step, unless this window's gradients were used already."""
        if self._is_due:
            self._is_due = False
            self.engine.step()
            # Not asked later: an engine that has read a checkpoint says that none was applied.
            self.step_was_skipped = not self.engine.was_step_applied()

    def drop(self) -> None:
        """Forget a complete window's gradients that no step has used; an open window's stay."""
        if self._is_due:
            self.drop_all()

    def drop_all(self) -> None:
        """Forget all gradients that no step has used, those of an open window too."""
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
        """Return the norm of the gradients of the last step, before clipping."""
        norm = self.engine.get_global_grad_norm()
        return 0.0 if norm is None else float(norm)


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """A prepared optimizer that steps by DeepSpeed's engine.

    Args:
        optimizer: the optimizer that DeepSpeed steps.
        engine: the wrapper of the engine.
        accumulation: the accumulation windows.
        device_memory: returns the memory in use, in bytes.

    Attributes:
        optimizer: the optimizer inside, with this rank's parts of the weights.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: DeepSpeedEngineWrapper,
        *,
        accumulation: Accumulation,
        device_memory: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__(optimizer, False, accumulation=accumulation, device_memory=device_memory)
        self._engine = engine

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step at the end of a window; nothing before it.

        Raises:
            NotImplementedError: a closure was given: DeepSpeed cannot compute gradients again.
        """
        if closure is not None:
            raise NotImplementedError(
                "DeepSpeed steps without a closure: call accelerator.backward(loss) and then "
                "optimizer.step()"
            )
        if self._accumulation.sync_gradients:
            self._engine.step()
            self._accumulation.note_step()
            if not self.step_was_skipped:
                self.num_steps += 1
                current().count_step(self._device_memory)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used; the engine's step clears the others."""
        self._engine.drop()

    def drop_gradients(self) -> None:
        self._engine.drop_all()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient overflowed."""
        return self._engine.step_was_skipped


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A prepared scheduler that DeepSpeed's engine moves with each of its steps.

    Attributes:
        scheduler: the engine's.
    """

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has moved it."""


def GatheredParameters(  # noqa: N802 (Accelerate's name)
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[Any]:
    """A block in which weights that DeepSpeed keeps in parts (stage 3) are whole.

    Around other weights it does nothing, so that code may always have it.

    Args:
        params: one weight, or several.
        modifier_rank: the rank whose changes count; None for none.
        fwd_module: as of ``deepspeed.zero.GatheredParameters``.
        enabled: False does nothing.
    """
    given = [params] if hasattr(params, "numel") else list(params)
    if not enabled or not any(hasattr(weight, "ds_id") for weight in given):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    block: AbstractContextManager[Any] = GatheredParameters(given, modifier_rank, fwd_module)
    return block
