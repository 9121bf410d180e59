"""``prepare``, and the methods that it calls: one for each kind of object.

A subclass of ``Accelerator`` may bring its own ``prepare_model`` or ``prepare_data_loader``, which
calls ours or not: ``prepare`` calls whichever the object has. DeepSpeed makes a model and its
optimizer ready in one step: there ``prepare`` calls neither ``prepare_model`` nor
``prepare_optimizer``, and a line names those of a subclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.notices import notice_once
from notebook_accel.training.state import newest_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from notebook_accel.training.optimizer import AcceleratedOptimizer
    from notebook_accel.training.prepare import Preparation
    from notebook_accel.training.scheduler import AcceleratedScheduler

__all__ = ["PreparingView"]


class PreparingView:
    """Part of ``Accelerator``: makes the objects of a training loop ready."""

    _prepared: Preparation

    @property
    def _models(self) -> list[Any]:
        """The models as they are called: Transformers' Trainer asks how many there are."""
        return [known.wrapped for known in self._prepared.models]

    @property
    def _optimizers(self) -> list[Any]:
        """Where a subclass that makes the prepared optimizer itself puts it, as in Accelerate."""
        return self._prepared.optimizers

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer was prepared that steps as it goes back (``lomo_backward``)."""
        return any(hasattr(one.optimizer, "fused_backward") for one in self._prepared.optimizers)

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Make models, optimizers, data loaders and schedulers ready, in any order.

        Args:
            *args: the objects; others are given back as they are.
            device_placement: for each object, whether it is put on the device.

        Returns:
            the objects to use instead, in the same order; a single one not as a tuple.

        Raises:
            AttributeError: ``AcceleratorState._reset_state()`` was called meanwhile.
            ConfigError: ``device_placement`` has not one entry an object.
            TypeError: an object belongs to another framework.
        """
        newest_settings()
        placement: Sequence[bool | None] = (
            [None] * len(args) if device_placement is None else device_placement
        )
        if self._prepared.plan.strategy.prepares_together:
            self._name_methods_left_out()
        ready = self._prepared.prepare(args, placement, self)
        return ready[0] if len(ready) == 1 else tuple(ready)

    def prepare_model(
        self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The model on its device, in its precision, spread over the ranks unless it is only
        evaluated."""
        return self._prepared.model(model, device_placement, evaluation=evaluation_mode)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """The loader that gives this rank's batches.

        ``slice_fn_for_dispatch(batch, slice, process_index=, num_processes=)`` takes a rank's part
        out of what rank 0 has read for all, in place of those rows of each tensor.
        """
        return self._prepared.loader(data_loader, device_placement, slice_fn_for_dispatch)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """The optimizer that steps at the end of a window."""
        return self._prepared.optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """The scheduler that moves with its optimizer's steps."""
        return self._prepared.scheduler(scheduler)

    def _name_methods_left_out(self) -> None:
        """Say which of the user's own methods ``prepare`` does not call."""
        own = [
            f"{name}()"
            for name in ("prepare_model", "prepare_optimizer")
            if getattr(getattr(self, name), "__func__", None) is not getattr(PreparingView, name)
        ]
        if own:
            notice_once(
                "methods left out",
                f"prepare() does not call {' and '.join(own)} of {type(self).__name__}: DeepSpeed "
                "makes a model and its optimizer ready in one step. Do before or after prepare() "
                "what they do",
            )
