"""``GradientState``: whether the current batch ends an accumulation window or a loader."""

from __future__ import annotations

from typing import Any

from notebook_accel.training.settings.handlers import GradientAccumulationPlugin
from notebook_accel.training.stepping.accumulation import (
    Accumulation,
    current_accumulation,
    forget_accumulation,
)
from notebook_accel.training.stepping.active_loaders import active_loaders


class GradientState:
    """View of gradient accumulation, and of the loader that is being iterated.

    It tells whether optimizers step with the current batch, and whether that batch is the last of
    its loader. A window is the group of batches whose gradients are summed for one step. The
    ``gradient_state`` of an ``Accelerator``, or of an object that it prepared, shows that
    ``Accelerator``'s accumulation. An instance that you make shows the newest ``Accelerator``'s.

    Args:
        gradient_accumulation_plugin: starts gradient accumulation anew with these settings on this
            rank; None shows the current accumulation.
        accumulation: for the package itself: the accumulation to show; None shows that of the
            newest ``Accelerator``.

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
        """Number of batches whose gradients are summed for one optimizer step."""
        return self._accumulation.num_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether prepared optimizers step with the current batch; may be set."""
        return self._accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        # Loops that were taken from Transformers' Trainer call it.
        self.sync_gradients = sync_gradients

    @property
    def adjust_scheduler(self) -> bool:
        """Field of the ``GradientAccumulationPlugin``; it has no effect, as in Accelerate."""
        return self._accumulation.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether optimizers step with a loader's last batch even if their window is not full."""
        return self._accumulation.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Fields of the ``GradientAccumulationPlugin`` by name; changes take effect."""
        return vars(self._accumulation.plugin)

    @property
    def initialized(self) -> bool:
        """Always True, since there is always a state to show; scripts for Accelerate read it."""
        return True

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(active_loaders().stack)

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that is being iterated; None outside of loops.

        If loops nest, it is the innermost loader: the one that gave the newest batch.
        """
        return active_loaders().position.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """None, followed by the prepared loaders that are being iterated, as in Accelerate."""
        return [None, *(position.loader for position in active_loaders().stack)]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether :attr:`active_dataloader` has given its final batch; False outside of loops."""
        return active_loaders().position.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples of all ranks in the final, incomplete round of the active loader.

        A round is one batch on each rank. Samples that are repeated to fill it up do not count. 0
        means that the final round is complete, -1 that the number is not known.
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
