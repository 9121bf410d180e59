"""``GradientState``: position of the training in its accumulation window and in its loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.stepping.accumulation import (
    Accumulation,
    current_accumulation,
    forget_accumulation,
)
from notebook_accel.training.stepping.active_loaders import active_loaders

if TYPE_CHECKING:
    from notebook_accel.training.settings.handlers import (
        GradientAccumulationPlugin,
    )

__all__ = ["GradientState"]


class GradientState:
    """Place of the training in its accumulation window, and in the loader that it reads.

    An ``Accelerator`` and what it prepared show its own windows. An instance that you make shows
    those of the newest ``Accelerator``.

    Args:
        gradient_accumulation_plugin: begins windows with these settings; None shows the current
            ones.
        accumulation: the windows to show; None for the newest.

    Example:
        >>> from notebook_accel import Accelerator, GradientState
        >>> accelerator = Accelerator(gradient_accumulation_steps=4)
        >>> GradientState().num_steps
        4
    """

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        accumulation: Accumulation | None = None,
    ) -> None:
        if gradient_accumulation_plugin is not None:
            Accumulation(gradient_accumulation_plugin).show()
        self._own = accumulation

    @property
    def _accumulation(self) -> Accumulation:
        return self._own or current_accumulation()

    @property
    def num_steps(self) -> int:
        """Batches per window."""
        return self._accumulation.num_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether prepared optimizers step with this batch, the last of its window; may be set."""
        return self._accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        # Loops that were taken from Transformers' Trainer call it.
        self.sync_gradients = sync_gradients

    @property
    def adjust_scheduler(self) -> bool:
        """Field of the plugin; without effect, as in Accelerate."""
        return self._accumulation.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a window that is still short."""
        return self._accumulation.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Fields of the plugin, to read and to set."""
        return vars(self._accumulation.plugin)

    @property
    def initialized(self) -> bool:
        """Always True."""
        return True

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(active_loaders().stack)

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that gave the last batch; None outside of loops."""
        return active_loaders().position.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """List of None and the prepared loaders that are being iterated."""
        return [None, *(position.loader for position in active_loaders().stack)]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch of the active loader is its last."""
        return active_loaders().end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples of all ranks in the last round, without repeated ones.

        0 means that the round is full, -1 that the number is not known.
        """
        return active_loaders().position.remainder

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        forget_accumulation()
        active_loaders().clear()
