"""Prepared learning rate schedulers, which by default move only when their optimizers step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from notebook_accel.training.processes import topology
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.stepping.accumulation import (
    Accumulation,
    GradientState,
    current_accumulation,
)
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer

# A rate this much smaller than the highest one counts as none.
_NOTHING = 1e-9


class AcceleratedScheduler:
    """Wraps a scheduler whose length was counted in batches of the loader before ``prepare``.

    ``Accelerator.prepare`` makes these objects. A step of the optimizer uses one batch on each of P
    ranks, so by default the schedule moves P steps with it. The schedule does not move on batches
    that only accumulate gradients, or if the optimizer's step was skipped. A scheduler that takes a
    metric (``ReduceLROnPlateau``) moves one step per call, except on batches that only accumulate
    gradients. An object that you make yourself follows the gradient accumulation of the newest
    ``Accelerator``.

    Args:
        scheduler: the scheduler to wrap.
        optimizers: the prepared optimizers whose learning rates it sets.
        step_with_optimizer: True: the schedule moves only when the optimizers stepped; False: it
            moves one step with each call.
        split_batches: True: the schedule moves one step per optimizer step, not P.
        accumulation: set by ``prepare``: the state of gradient accumulation.
        num_steps: set by ``prepare``: steps of the schedule per optimizer step; None derives them
            from ``split_batches``.
        num_shares: set by ``prepare``: P, the number of parts into which the data is divided; None:
            the number of ranks.

    Attributes:
        scheduler: the wrapped scheduler.
        optimizers: the prepared optimizers whose learning rates it sets.
        num_steps: steps of the schedule per optimizer step.
        step_with_optimizer: whether the schedule moves only when the optimizers stepped.

    Example:
        >>> import torch
        >>> from notebook_accel import AcceleratedScheduler, Accelerator
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        >>> model, optimizer, scheduler = Accelerator().prepare(model, optimizer, scheduler)
        >>> isinstance(scheduler, AcceleratedScheduler), scheduler.get_last_lr()
        (True, [0.1])
    """

    _notebook_accel_stays_home = "make it inside the function"

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: Sequence[AcceleratedOptimizer] | AcceleratedOptimizer,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        accumulation: Accumulation | None = None,
        num_steps: int | None = None,
        num_shares: int | None = None,
    ) -> None:
        self._num_shares = num_shares or topology.topology().num_processes
        if num_steps is None:
            num_steps = 1 if split_batches else self._num_shares
        self.scheduler = scheduler
        self.optimizers = [*optimizers] if isinstance(optimizers, Sequence) else [optimizers]
        self.num_steps = num_steps
        self.step_with_optimizer = step_with_optimizer
        self._peak = 0.0
        self._ran_out = False
        self._accumulation = accumulation or current_accumulation()

    @property
    def gradient_state(self) -> GradientState:
        """The ``GradientState`` of the gradient accumulation that this scheduler follows."""
        return GradientState(accumulation=self._accumulation)

    @property
    def split_batches(self) -> bool:
        """Whether the schedule moves one step per optimizer step, however many ranks there are.

        Set it to True if the length of the schedule was counted in optimizer steps.
        """
        return self.num_steps == 1

    @split_batches.setter
    def split_batches(self, value: bool) -> None:
        self.num_steps = 1 if value else self._num_shares

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the schedule by ``num_steps`` if the optimizers made a step.

        There are two exceptions. With ``step_with_optimizer=False`` the schedule moves one step on
        every call. A ``ReduceLROnPlateau`` moves one step on every call, except on batches that
        only accumulate gradients.

        The arguments are passed to the wrapped scheduler. If the schedule does not move, that
        scheduler is left untouched: not even its ``_step_count`` changes, since torch's schedulers
        compute with it.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif isinstance(self.scheduler, ReduceLROnPlateau):
            # A metric is one, however many ranks found it; after the loop, where it is measured,
            # a window may be open.
            if self._accumulation.sync_gradients or not self._accumulation.inside:
                self.scheduler.step(*args, **kwargs)
        # Of a fused optimizer in fp16 only the device knows, so that the host waits for it here:
        # torch's schedulers compute their rates on the host.
        elif self._accumulation.sync_gradients and not any(
            optimizer.step_was_skipped for optimizer in self.optimizers
        ):
            self._move(*args, **kwargs)

    def _move(self, *args: Any, **kwargs: Any) -> None:
        total = getattr(self.scheduler, "total_steps", None)  # OneCycleLR raises beyond its end
        for _ in range(self.num_steps):
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)
        if self.num_steps > 1:
            self._watch_the_end()

    def _watch_the_end(self) -> None:
        """Warn once if the rate is 0 after two moves; 0 after one may be the end."""
        highest = max(float(rate) for rate in self.scheduler.get_last_lr())
        self._peak = max(self._peak, highest)
        if highest > _NOTHING * self._peak:
            self._ran_out = False
        elif not self._ran_out:
            # A schedule of the right length reaches 0 too, with its last step.
            self._ran_out = self._peak > 0
        else:
            notice_once(
                "schedule ran out",
                f"the learning rate has reached 0 while training goes on: a prepared "
                f"{type(self.scheduler).__name__} moves {self.num_steps} steps with each step of "
                "the optimizer, so count its length with len() of the loader before prepare()",
            )

    def get_last_lr(self) -> list[float]:
        """Return the current learning rates, one per parameter group."""
        return [float(rate) for rate in self.scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not yet there: a copy is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"

    def __notebook_accel_unwrap__(self) -> LRScheduler:
        """Return the wrapped scheduler, which a rank sends to the notebook instead of this object.

        The notebook has no ``Accelerator`` with which a prepared scheduler could move.
        """
        return self.scheduler
