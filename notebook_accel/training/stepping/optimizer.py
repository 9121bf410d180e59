"""Prepared optimizers and schedulers, and a warning for optimizers that were not prepared.

A prepared optimizer steps only with the last batch of each accumulation window (the group of
batches whose gradients are summed for one step), skips steps whose gradients overflowed, and
reports its steps.

A loop calls ``zero_grad`` for every batch, either before the backward or after the step. So inside
a window of several batches it must not clear gradients that a later step will use. ``zero_grad``
clears the gradients

- at once, if a step has used them, or outside of windows;
- at once, on the last batch of a window after that batch's backward, if no step has used them: the
  loop discards the window (because the gradient norm was not finite, say);
- when the last batch ends, if neither a backward nor a step followed ``zero_grad``: the loop
  discarded the window before the backward of its last batch;
- not at all otherwise, since this ``zero_grad`` stands before the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from notebook_accel.rank.this_rank import DeviceMemory, current
from notebook_accel.training.models import PreparedModel, weights_of
from notebook_accel.training.precision import LossScaling, gradient_marks
from notebook_accel.training.processes import topology
from notebook_accel.training.settings.notices import notice, notice_once
from notebook_accel.training.stepping.accumulation import (
    Accumulation,
    GradientState,
    current_accumulation,
)
from notebook_accel.training.stepping.around_steps import call_around_steps
from notebook_accel.training.stepping.step_timer import REST, step_timer


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the plain settings of each group; its rate is the one that a schedule begins with."""
    plain = (bool, int, float, str, type(None))
    groups = []
    for group in optimizer.param_groups:
        found = {
            name: value
            for name, value in group.items()
            if all(type(one) in plain for one in (value if type(value) is tuple else (value,)))
        }
        if "initial_lr" in found:
            found["lr"] = found.pop("initial_lr")
        groups.append(found)
    return groups


def _of_inner(name: str, doc: str) -> property:
    """Return a property that reads and sets the attribute ``name`` of the wrapped optimizer."""
    return property(
        lambda prepared: getattr(prepared.optimizer, name),
        lambda prepared, value: setattr(prepared.optimizer, name, value),
        doc=doc,
    )


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer so that it steps only at the end of an accumulation window.

    A window is the group of batches whose gradients are summed for one step. On all its batches but
    the last, ``step`` does nothing, and ``zero_grad`` keeps the gradients that a later step will
    use. ``Accelerator.prepare`` makes these objects, which schedulers and other code can use as a
    ``torch.optim.Optimizer``. An object that you make yourself follows the windows of the newest
    ``Accelerator``.

    Args:
        optimizer: the optimizer to wrap.
        device_placement: whether the optimizer's states are moved to the device of their weights.
        scaler: loss scaler of fp16; None without loss scaling.
        accumulation: set by ``prepare``: the state of gradient accumulation.
        scaling: set by ``prepare``: the loss scaling of the ``Accelerator``.
        device_memory: set by ``prepare``: returns the memory of the device, for the reports.
        drop_unreduced: set by ``prepare``: clears gradients that a library for sharded weights
            sums up outside of ``grad``.

    Attributes:
        optimizer: the wrapped optimizer.
        scaling: the loss scaling of fp16; None without loss scaling.

    Example:
        >>> import torch
        >>> from notebook_accel import AcceleratedOptimizer, Accelerator
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = Accelerator().prepare(model, optimizer)
        >>> isinstance(optimizer, AcceleratedOptimizer), type(optimizer.optimizer).__name__
        (True, 'SGD')
    """

    _notebook_accel_stays_home = "make it inside the function"
    # The groups' settings before the first step and before a checkpoint was loaded.
    made: list[dict[str, Any]] | None = None

    # The wrapped optimizer has the state: the base class's __init__ would make a second one.
    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        accumulation: Accumulation | None = None,
        scaling: LossScaling | None = None,
        device_memory: Callable[[], DeviceMemory | None] | None = None,
        drop_unreduced: Callable[[Optimizer], None] | None = None,
    ) -> None:
        if device_placement and optimizer.state:
            # Loading moves a state that was made elsewhere to the device of its parameters.
            optimizer.load_state_dict(optimizer.state_dict())
        if scaler is not None:
            scaling = LossScaling(scaler)
        self.optimizer = optimizer
        self._num_tried = 0
        # Tensors where only the device knows: they are read once somebody asks, as a read waits
        # for all that is queued.
        self._num_skipped: int | torch.Tensor = 0
        self._overflow: bool | torch.Tensor = False
        self._used = self._has_stepped = False
        # Of the last batch of a window: the gradients as it began (None: it is not running), and
        # whether zero_grad was called before any of its own came.
        self._at_start: list[tuple[int, int]] | None = None
        self._was_held_back = False
        self._accumulation = accumulation or current_accumulation()
        self._accumulation.optimizers.add(self)
        self.scaling = scaling
        self._device_memory = device_memory
        # Drops what a window has added up and no gradient shows.
        self._drop_unreduced = drop_unreduced
        # Also where other code steps the wrapped one: a checkpoint must not keep those gradients.
        with suppress(AttributeError):  # without Optimizer's __init__ there are no hooks
            own = weakref.ref(self)

            def note_used(*_: Any) -> None:
                if (wrapper := own()) is not None:
                    wrapper._used = wrapper._has_stepped = True

            # It stays, as those of around_steps.py.
            optimizer.register_step_post_hook(note_used)

    param_groups: Any = _of_inner("param_groups", "Parameter groups of the optimizer inside.")
    state: Any = _of_inner("state", "State of the optimizer inside.")
    defaults: Any = _of_inner("defaults", "Defaults of the optimizer inside.")

    @property
    def step_was_skipped(self) -> bool:
        """Whether the newest step was skipped because a gradient overflowed in fp16."""
        self._overflow = bool(self._overflow)
        return self._overflow

    @property
    def num_steps(self) -> int:
        """Number of steps, without skipped ones; after a checkpoint, with those before it."""
        return self._num_tried - int(self._num_skipped)

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_tried, self._num_skipped = value, 0

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16, else None. To replace it, set ``Accelerator.scaler``."""
        return None if self.scaling is None else self.scaling.scaler

    @property
    def gradient_state(self) -> GradientState:
        """The ``GradientState`` of the gradient accumulation that this optimizer follows."""
        return GradientState(accumulation=self._accumulation)

    @property
    def has_unused_gradients(self) -> bool:
        """Whether a weight of this optimizer has a gradient that no step has used."""
        return not self._used and any(one.grad is not None for one in weights_of(self))

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step if the current batch is the last of its accumulation window; else do nothing.

        Args:
            closure: computes the loss again and returns it, for optimizers such as LBFGS.

        Returns:
            what the wrapped optimizer's ``step`` returns; None if no step was made.
        """
        if not self._accumulation.sync_gradients:
            return None
        at, num_steps = self._accumulation, self._accumulation.num_steps
        if num_steps > 1 and at.inside and not at.has_backward and self.has_unused_gradients:
            notice_once(
                "plain backward",
                "loss.backward() was called inside accumulate(), so that the loss was not divided "
                f"by {num_steps}. Write accelerator.backward(loss)",
            )
        if self.made is None:
            self.made = settings_of(self.optimizer)
        context = current()
        context.begin_step()
        timer = step_timer(context)
        timer.mark(REST)
        # One that wraps another steps it inside, which is no step of an unprepared one.
        at.is_stepping = True
        try:
            result = self._take_step(closure)
        finally:
            at.is_stepping = False
        timer.end_step()
        self._used = True
        at.note_step()
        self._num_tried += 1
        # The progress shown counts steps that a fused optimizer skips.
        context.count_step(self._device_memory, skipped=self._overflow is True)
        return result

    def _take_step(self, closure: Callable[[], float] | None) -> Any:
        if self.scaling is None:
            return self.optimizer.step(*(() if closure is None else (closure,)))
        self._has_stepped = False
        result, found = self.scaling.step(self.optimizer, closure)
        self._overflow = False
        if found is not None and self.optimizer.defaults.get("fused"):
            self._overflow = found  # it skips the step on the device
        elif found is not None and not self._has_stepped:
            self._overflow = bool(found)  # torch has read it, to decide whether to step
        if self._overflow is not False:
            self._num_skipped = self._num_skipped + self._overflow
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a later step of the accumulation window will use them.

        Args:
            set_to_none: whether to set gradients to None; False sets them to 0.
        """
        at = self._accumulation
        # One step a window keeps some only where code itself says that a batch is not its last.
        is_kept = not at.sync_gradients or (at.num_steps > 1 and at.inside)
        if is_kept and not self._used and not self._has_new_gradients():
            self._was_held_back = True
            return
        self._clear(set_to_none)

    def _clear(self, set_to_none: bool) -> None:
        # Cleared gradients have no window yet: the next ones are kept until a step uses them.
        self._used = False
        self._was_held_back = False
        if set_to_none:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=False)
        if self._drop_unreduced is not None:
            self._drop_unreduced(self.optimizer)
        if self._at_start is not None:
            self._at_start = gradient_marks(self.optimizer)
        if self.scaling is not None:
            self.scaling.forget(self.optimizer)

    def begin_last_batch(self) -> None:
        """Record the gradients that exist when the last batch of an accumulation window begins.

        Gradients that differ later show that this batch has had its backward. ``accumulate`` calls
        this method.
        """
        self._at_start = gradient_marks(self.optimizer)
        self._was_held_back = False

    def end_last_batch(self) -> None:
        """End the last batch of an accumulation window; ``accumulate`` calls it.

        It clears the gradients if the loop discarded them: if the loop called ``zero_grad``, and
        after that neither ran a backward nor called ``step``.
        """
        is_dropped = self._was_held_back and not self._used and not self._has_new_gradients()
        self._at_start = None
        if is_dropped:
            self._clear(set_to_none=True)

    def _has_new_gradients(self) -> bool:
        """Whether the last batch of an accumulation window is running and has had a backward."""
        return self._at_start is not None and gradient_marks(self.optimizer) != self._at_start

    def train(self) -> None:
        """Switch a schedule-free optimizer to training mode; do nothing for any other one."""
        getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation mode; do nothing for any other one."""
        getattr(self.optimizer, "eval", lambda: None)()

    def drop_gradients(self) -> None:
        """Clear all gradients, even those that a later step of the window would use."""
        self._clear(set_to_none=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet there: a copy is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Windows and loss scale are the process's; one that is unpickled takes those it finds.
        return AcceleratedOptimizer, (self.optimizer, False)

    def __notebook_accel_unwrap__(self) -> Optimizer:
        """Return the wrapped optimizer, which a rank sends to the notebook instead of this object.

        The notebook has no ``Accelerator`` with which a prepared optimizer could step.
        """
        return self.optimizer


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a prepared one; return any other optimizer unchanged."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


@dataclass(kw_only=True, eq=False)
class UnpreparedWatch:
    """Warns once when an optimizer that was not prepared steps a prepared model's weights."""

    accumulation: Accumulation
    scaling: LossScaling | None
    models: Sequence[PreparedModel]
    known: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet, init=False)
    """The optimizers whose steps cause no warning (any more): those that were prepared."""
    _started: bool = field(default=False, init=False)

    def start(self) -> None:
        """Watch the steps of all optimizers of this process."""
        if self._started or (self.scaling is None and self.accumulation.num_steps == 1):
            return
        self._started = True
        call_around_steps(before=self._look)

    def _look(self, optimizer: Optimizer) -> None:
        if self.scaling is not None:
            reason = "so it used gradients that are still multiplied with the loss scale"
        elif not self.accumulation.sync_gradients:
            reason = "so it used the gradients of a window that is not complete"
        else:
            return
        if self.accumulation.is_stepping or optimizer in self.known:
            return
        self.known.add(optimizer)
        prepared = {id(weight) for model in self.models for weight in model.inner.parameters()}
        if any(id(weight) in prepared for weight in weights_of(optimizer)):
            notice(
                f"{type(optimizer).__name__} was stepped without accelerator.prepare(optimizer), "
                f"{reason}"
            )


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
        num_shares: int | None = None,
    ) -> None:
        self._num_shares = num_shares or topology.topology().num_processes
        self.scheduler = scheduler
        self.optimizers = [*optimizers] if isinstance(optimizers, Sequence) else [optimizers]
        self.split_batches = split_batches
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
        if self.num_steps == 1:
            return
        # The rate may be 0 after the last move; after two the schedule was too short.
        highest = max(float(rate) for rate in self.scheduler.get_last_lr())
        self._peak = max(self._peak, highest)
        if highest > _NOTHING * self._peak:
            self._ran_out = False
        elif not self._ran_out:
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

    # In the class, where subclasses and torch's distributed checkpoints look for them.
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
