"""Stand-ins for an optimizer and a scheduler that a DeepSpeed configuration describes.

The loop makes them where it would make its own, so that it reads like any other; ``prepare`` puts
DeepSpeed's in their place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

__all__ = ["DummyOptim", "DummyScheduler"]


class DummyOptim(torch.optim.Optimizer):
    """Stands for the optimizer of a DeepSpeed configuration.

    Attributes:
        params: the parameters or groups, as given.
        lr, weight_decay, kwargs: what the configuration's "auto" entries are filled in with.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        """Note the parameters.

        Args:
            params: parameters, or dictionaries of groups.
            lr: the learning rate.
            weight_decay: the weight decay.
            **kwargs: further settings, such as ``betas`` and ``eps``.
        """
        given = list(params)
        # The base class completes the groups in place; DeepSpeed gets them as they were.
        self.params = [dict(one) if isinstance(one, dict) else one for one in given]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        super().__init__(given, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> NoReturn:
        """Raise: there is nothing to step.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_alone("DummyOptim", "optimizer"))


class DummyScheduler(LRScheduler):
    """Stands for the scheduler of a DeepSpeed configuration.

    Attributes:
        optimizer, total_num_steps, warmup_num_steps, lr_scheduler_callable, kwargs: as given.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note what the configuration's "auto" entries are filled in with.

        Args:
            optimizer: the optimizer whose rates the scheduler sets.
            total_num_steps: length of the schedule, counted like that of every scheduler that is
                prepared: with ``len()`` of the loader before ``prepare``.
            warmup_num_steps: steps until the full rate, counted in the same way.
            lr_scheduler_callable: makes a scheduler of an optimizer, instead of the
                configuration.
            **kwargs: accepted.
        """
        # Not the base class's, which would begin a schedule.
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, epoch: int | None = None) -> NoReturn:
        """Raise: there is nothing to move.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_alone("DummyScheduler", "scheduler"))


def _alone(name: str, what: str) -> str:
    return (
        f"{name}.step() was called: it stands for the {what} of a DeepSpeed configuration, and "
        "none was put in its place. Make the Accelerator with a DeepSpeedPlugin and pass the "
        f"{name} to prepare() beside the model, or use a {what} of torch"
    )
