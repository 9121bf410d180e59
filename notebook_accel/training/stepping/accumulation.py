"""Gradient accumulation: on which batches gradients are exchanged and the optimizers step.

A *window* is the group of batches whose gradients are summed for one optimizer step.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch

from notebook_accel.config.checks import as_count, value_of
from notebook_accel.rank.this_rank import current
from notebook_accel.training.collectives.nested import leaves
from notebook_accel.training.processes.random_numbers import get_torch_states
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.handlers import GradientAccumulationPlugin
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.stepping.active_loaders import Position, active_loaders

GradientSync = Callable[[torch.nn.Module, bool], AbstractContextManager[Any]]
Models = torch.nn.Module | Sequence[torch.nn.Module]

_OPEN_WINDOW = (
    "a loader ended within an accumulation window, so gradients of its last batches go into the "
    "next window: its last batch had fewer accumulate() blocks than the batches before. Give each "
    "batch as many, or make the loader with drop_last=True"
)


class Accumulation:
    """Settings of gradient accumulation, and the place in the window: the batches of one step."""

    def __init__(
        self, plugin: GradientAccumulationPlugin, device: torch.device | None = None
    ) -> None:
        # A copy: what is set on the way holds for these windows alone.
        self.plugin = replace(plugin)
        self.sync_gradients = True
        self.step = 0
        self.inside = False
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_backward = False
        self.is_stepping = False
        self.loaders = active_loaders()
        self.trained_on: Any = None
        self.random_states: dict[str, Any] = {}
        self._device = device or torch.device("cpu")
        # The pass over a loader that the newest block is of. Of the batches that it gave since the
        # block before: how many they are, and the blocks since. And the blocks for each batch
        # before them; 0 where each block had a fetch of its own, None while nothing is known.
        self._pass = Position()
        self._num_fetched = self._num_blocks = 0
        self._blocks_a_batch: int | None = None

    @property
    def num_steps(self) -> int:
        """Number of batches per optimizer step (per window); may be set at any time."""
        return self.plugin.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.plugin.num_steps = value

    def note_step(self) -> None:
        """Record a real step and its loader: training resumes only right after a step."""
        self.note_random_states()
        self.has_backward = False
        stack = self.loaders.stack
        if stack:
            self.trained_on = stack[-1].loader
        for one in stack:
            self.loaders.trained.add(one.loader)
            one.at_step, one.is_after_step = one.num_given, True

    def note_random_states(self) -> None:
        """Store the random states of torch and the device, with which the next window begins.

        For windows of one batch nothing is stored.
        """
        if self.num_steps > 1:
            self.random_states = get_torch_states(self._device)

    def advance(self) -> None:
        """Count the next batch, and set ``sync_gradients`` for it; ``accumulate`` calls it."""
        is_last = self._count_block()
        if is_last and self.plugin.sync_with_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0

    def _count_block(self) -> bool:
        """Count a block; return whether it is the last that the loader's end gets."""
        stack = self.loaders.stack
        if stack and stack[-1] is not self._pass:
            is_open = self._pass.end_of_dataloader and not self.sync_gradients
            if is_open and self.plugin.sync_with_dataloader:
                notice_once("open window", _OPEN_WINDOW)
            self._pass = stack[-1]
        fetched = self._pass.num_given - self._pass.num_in_blocks
        if fetched:
            if self._num_blocks:
                several = self._num_blocks > 1 and self._num_fetched > 0
                self._blocks_a_batch = several and max(1, self._num_blocks // self._num_fetched)
            self._pass.num_in_blocks = self._pass.num_given
            self._num_fetched, self._num_blocks = fetched, 0
        self._num_blocks += 1
        a_batch = self._blocks_a_batch
        if a_batch is None:  # more than a window: the loop has left batches out
            a_batch = self._num_fetched <= self.num_steps
        expected = self._num_fetched * a_batch - self._num_missing_blocks(a_batch)
        # Without a stack: the loop has asked for more batches than there were.
        is_last = self._num_blocks == expected or (self._num_blocks > expected and bool(stack))
        return is_last and self._pass.end_of_dataloader

    def _num_missing_blocks(self, a_batch: int) -> int:
        """Number of blocks by which a short last batch has fewer than the ``a_batch`` of others."""
        short, loader = self._pass.short_round, self._pass.loader
        size = loader and loader.own_batch_size
        if a_batch < 2 or not size or short is None or not short.batch_size:
            return 0
        # The most samples that blocks of which `a_batch` make a full batch can have.
        of_block: int = max(1, (size - 1) // (a_batch - 1))
        return max(0, a_batch - math.ceil(short.batch_size / of_block))

    def reset(self) -> None:
        """Begin a new window: no batch is counted yet, and the stored random states are dropped."""
        self.step = 0
        self.sync_gradients = True
        self.random_states = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Windows are the process's: what is unpickled belongs to those that it finds.
        return current_accumulation, ()


class Window:
    """The context manager of ``Accelerator.accumulate``, which is entered once per batch.

    It keeps the ranks from exchanging gradients on all batches of a window but the last one, unless
    ``sync_each_batch`` is set. A class, as a generator takes twice the time of each step.

    Args:
        sync: ``sync(model, False)`` returns a context in which the model's backward exchanges no
            gradients; with True the backward exchanges them.
    """

    __slots__ = ("_accumulation", "_models", "_outer", "_stack", "_stepped", "_sync")

    def __init__(
        self, accumulation: Accumulation, models: Sequence[Models], sync: GradientSync
    ) -> None:
        self._accumulation, self._models, self._sync = accumulation, models, sync

    def __enter__(self) -> None:
        at = self._accumulation
        at.advance()
        self._outer, at.inside = at.inside, True
        self._stack: ExitStack | None = None
        is_last = at.sync_gradients and at.num_steps > 1
        self._stepped = [*at.optimizers] if is_last else ()
        for optimizer in self._stepped:
            optimizer.begin_last_batch()
        if not (at.sync_gradients or at.plugin.sync_each_batch):
            self._stack = ExitStack()
            for model in leaves(self._models):
                if isinstance(model, torch.nn.Module):  # callers also name optimizers, losses
                    self._stack.enter_context(self._sync(model, False))

    def __exit__(self, *_: object) -> None:
        self._accumulation.inside = self._outer
        for optimizer in self._stepped:
            optimizer.end_last_batch()
        if self._stack is not None:
            self._stack.close()


def current_accumulation() -> Accumulation:
    """Return the gradient accumulation of this rank's newest ``Accelerator``.

    If there is no ``Accelerator`` yet, the settings come from the environment variables.
    """
    found: Accumulation | None = current().shared.get(Accumulation)
    if found is None:
        found = current().shared[Accumulation] = Accumulation(resolve_plugin(None, None))
    return found


def resolve_plugin(
    num_steps: int | None, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin:
    """Return the settings of gradient accumulation.

    Args:
        num_steps: the ``gradient_accumulation_steps`` of ``Accelerator``; None if not given.
        plugin: the plugin that ``Accelerator`` was given, used if ``num_steps`` is None. If both
            are None, ACCELERATE_GRADIENT_ACCUMULATION_STEPS decides; if that is unset, gradients
            are not accumulated.
    """
    in_environment = None
    if (variable := environment.find("GRADIENT_ACCUMULATION_STEPS")) is not None:
        in_environment = as_count(variable, value_of(os.environ[variable], int))
    if num_steps is not None:
        num_steps = as_count("gradient_accumulation_steps", num_steps)
        plugin = GradientAccumulationPlugin(num_steps=num_steps)
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=in_environment or 1)
    if in_environment is not None and in_environment != plugin.num_steps:
        notice_once(
            "accumulation",
            f"gradient_accumulation_steps={plugin.num_steps} of the code is used, not the "
            f"environment's {in_environment}",
        )
    return plugin


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
            current().shared[Accumulation] = Accumulation(gradient_accumulation_plugin)
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
        current().shared.pop(Accumulation, None)
        active_loaders().clear()
