"""Where an ``Accelerator`` stands in its window of batches, to read and to set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.training.configured import ConfiguredView
from notebook_accel.training.settings import as_steps

if TYPE_CHECKING:
    import torch

    from notebook_accel.training.plan import Plan
    from notebook_accel.training.prepare import Preparation
    from notebook_accel.training.settings import ProjectConfiguration

__all__ = ["WindowView"]


class WindowView(ConfiguredView):
    """Base of ``Accelerator``: gradient accumulation and loss scaling as they stand now."""

    def __init__(
        self, plan: Plan, project_configuration: ProjectConfiguration, prepared: Preparation
    ) -> None:
        super().__init__(plan, project_configuration)
        self._accumulation = plan.accumulation
        self._scaling = plan.strategy.scaling
        self._prepared = prepared

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; None otherwise. One that is set scales losses from then on, in
        any precision; None scales none."""
        return None if self._scaling is None else self._scaling.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        strategy = self._plan.strategy
        strategy.scale_by(scaler)
        self._scaling = self._prepared.watch.scaling = strategy.scaling
        for optimizer in self._prepared.optimizers:
            optimizer.scaling = strategy.scaling

    @property
    def sync_gradients(self) -> bool:
        """Whether the next step of a prepared optimizer is a real one."""
        return self._accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches a window."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._accumulation.num_steps = as_steps("gradient_accumulation_steps", value)
        self._prepared.watch.start(self)

    @property
    def step(self) -> int:
        """Batches since a loader gave its last one, which closes a window; since the start with
        ``sync_with_dataloader=False``."""
        return self._accumulation.step

    @step.setter
    def step(self, value: int) -> None:
        self._accumulation.step = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer left out its last step because a gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)
