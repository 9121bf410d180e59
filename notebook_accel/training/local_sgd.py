"""Local SGD: ranks train on their own for some steps, then their weights are averaged."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch.nn import Module

from notebook_accel.config.checks import as_count
from notebook_accel.errors import ConfigError
from notebook_accel.training.accelerator import Accelerator
from notebook_accel.training.settings.handlers import DistributedType


class LocalSGD:
    """Context manager in which ranks train separately, and average their weights every few steps.

    All ranks have to enter it. Inside, backward does not exchange gradients. At the end the weights
    are averaged once more, unless the block ends by an exception.

    Args:
        accelerator: the ``Accelerator`` that prepared the model.
        model: the prepared model.
        local_sgd_steps: number of calls of :meth:`step` from one average to the next.
        enabled: False: never average; backward exchanges gradients as usual.

    Raises:
        ConfigError: the model's weights are sharded over ranks, the ranks compute on XLA, or
            ``local_sgd_steps`` is no whole number of at least 1.

    Source: S. U. Stich, "Local SGD Converges Fast and Communicates Little" (2019).

    Example:
        >>> import torch
        >>> from notebook_accel import Accelerator
        >>> from notebook_accel.local_sgd import LocalSGD
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     for step in range(16):
        ...         accelerator.backward(model(torch.ones(4, 2)).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         local_sgd.step()
    """

    def __init__(
        self, accelerator: Accelerator, model: Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        strategy = accelerator._strategy
        if strategy.saves_together or accelerator.distributed_type == DistributedType.XLA:
            raise ConfigError(
                f"LocalSGD got a model of which each rank has a part ({type(strategy).__name__}), "
                "or one on XLA: it averages whole models. Leave it out, or train with DDP"
            )
        self.local_sgd_steps = as_count("local_sgd_steps", local_sgd_steps)
        self.accelerator = accelerator
        self.model = model
        self.enabled = enabled and accelerator.distributed_type != DistributedType.NO
        self.num_steps = 0
        self._stack = ExitStack()

    def __enter__(self) -> LocalSGD:  # noqa: PYI034
        if self.enabled:
            self._stack.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        # After an exception the other ranks may not come to an average.
        if self.enabled and kind is None:
            self._average()

    def step(self) -> None:
        """Count a training step; average the weights at every ``local_sgd_steps``-th step.

        All ranks have to call it after each step of the optimizer.
        """
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(self.accelerator.reduce(parameter.detach(), reduction="mean"))
