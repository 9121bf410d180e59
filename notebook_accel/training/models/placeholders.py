"""Placeholders for an optimizer and a scheduler that are described in a DeepSpeed configuration.

A training script creates them where it would create an optimizer and a scheduler of torch, and
passes them to ``prepare``, which returns the ones that DeepSpeed made from its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.errors import ConfigError


class DummyOptim(torch.optim.Optimizer):
    """Placeholder for the optimizer in the section "optimizer" of a DeepSpeed configuration.

    ``prepare`` returns DeepSpeed's optimizer in its place.

    Attributes:
        params: the parameters or groups, as given.
        lr, weight_decay, kwargs: values for entries of that section that are "auto".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        """Store the parameters, and the values for "auto" entries of the configuration.

        Args:
            params: parameters, or dictionaries of parameter groups.
            lr: learning rate, used if the configuration says "auto".
            weight_decay: weight decay, used if the configuration says "auto".
            **kwargs: values for further "auto" entries, such as ``betas`` and ``eps``.
        """
        given = list(params)
        # The base class completes the groups in place; DeepSpeed gets them as they were.
        self.params = [dict(one) if isinstance(one, dict) else one for one in given]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        super().__init__(given, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> NoReturn:
        """Raise: the placeholder was not replaced by DeepSpeed's optimizer in ``prepare``.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_alone("DummyOptim", "optimizer"))


class DummyScheduler(LRScheduler):
    """Placeholder for the scheduler in the section "scheduler" of a DeepSpeed configuration.

    ``prepare`` returns DeepSpeed's scheduler in its place.

    Attributes:
        optimizer, total_num_steps, warmup_num_steps, lr_scheduler_callable, kwargs: the arguments
            of the constructor, unchanged.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the values for "auto" entries of the configuration.

        Args:
            optimizer: the optimizer whose learning rates the scheduler sets.
            total_num_steps: length of the schedule. As for every prepared scheduler, it counts
                batches of the loader before ``prepare``: ``num_epochs * len(loader)``. None leaves
                it to the configuration.
            warmup_num_steps: steps until the full learning rate, counted in the same way.
            lr_scheduler_callable: called with the optimizer; returns a scheduler to use instead of
                the one in the configuration.
            **kwargs: values for further "auto" entries.
        """
        # Not the base class's, which would begin a schedule.
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, epoch: int | None = None) -> NoReturn:
        """Raise: the placeholder was not replaced by DeepSpeed's scheduler in ``prepare``.

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
