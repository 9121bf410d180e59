"""Windows of several batches between two steps: when gradients are exchanged and used."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.launch.rank import current
from notebook_accel.training.processes.random_states import note_torch_states
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.handlers import GradientAccumulationPlugin, as_steps
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.stepping.active_loaders import active_loaders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    GradientSync = Callable[[torch.nn.Module, bool], AbstractContextManager[Any]]
    Models = torch.nn.Module | Sequence[torch.nn.Module]

__all__ = [
    "Accumulation",
    "Window",
    "current_accumulation",
    "forget_accumulation",
    "resolve_plugin",
]

_CURRENT = "accumulation"


class Accumulation:
    """State of gradient accumulation: its settings, and the position in the current window.

    Attributes:
        plugin: the settings of the windows, as they are now.
        sync_gradients: whether the next step of a prepared optimizer is a real one.
        step: batches since a loader gave its last one; since the start with
            ``sync_with_dataloader=False``.
        inside: whether a block of ``accumulate`` is running.
        optimizers: those prepared for these windows, which hear when a last batch begins and
            ends.
        is_stepping: whether a step of one of them runs.
        trained_on: the loader whose batches the last real step used; None before the first.
        random_states: of torch and the device, as the window that is open began. Those of Python
            and numpy are not noted: to ask for Python's costs as much as a small layer.
    """

    def __init__(
        self, plugin: GradientAccumulationPlugin, device: torch.device | None = None
    ) -> None:
        # A copy: what is set on the way holds for these windows alone.
        self.plugin = replace(plugin)
        self.sync_gradients = True
        self.step = 0
        self.inside = False
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_stepping = False
        self.loaders = active_loaders()
        self.trained_on: Any = None
        self.random_states: dict[str, Any] = {}
        self._device = device or torch.device("cpu")

    @property
    def num_steps(self) -> int:
        """Number of batches per window; may be set at any time."""
        return self.plugin.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.plugin.num_steps = value

    def note_step(self) -> None:
        """Note a real step of an optimizer, on batches of the loader that is being read."""
        self.note_random_states()
        stack = self.loaders.stack
        if stack:
            self.trained_on = stack[-1].loader
            self.loaders.note_step()

    def note_random_states(self) -> None:
        """Keep the random states with which the next window begins."""
        if self.num_steps > 1:
            self.random_states = note_torch_states(self._device)

    def show(self) -> None:
        """Make :func:`current_accumulation` return this object on this rank."""
        current().shared[_CURRENT] = self

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients that no step has used belong to a window that is still open."""
        # One step a window keeps some only where code itself says that a batch is not its last.
        return not self.sync_gradients or (self.num_steps > 1 and self.inside)

    def advance(self) -> None:
        """Begin the next batch of the window, and set ``sync_gradients`` for it."""
        if self.plugin.sync_with_dataloader and self.loaders.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0

    def reset(self) -> None:
        """Begin a new window, and drop the batch count and random states of the old one."""
        self.step = 0
        self.sync_gradients = True
        self.random_states = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Windows are the process's: what is unpickled belongs to those that it finds.
        return current_accumulation, ()


class Window:
    """Context manager of one ``accumulate`` block, which is one batch of a window."""

    __slots__ = ("_accumulation", "_is_last", "_models", "_outer", "_stack", "_sync")

    def __init__(
        self, accumulation: Accumulation, models: Sequence[Models], sync: GradientSync
    ) -> None:
        self._accumulation = accumulation
        self._models = models
        self._sync = sync
        self._outer = False
        self._is_last = False
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        accumulation = self._accumulation
        accumulation.advance()
        self._outer = accumulation.inside
        accumulation.inside = True
        self._is_last = accumulation.sync_gradients and accumulation.num_steps > 1
        if self._is_last:
            for optimizer in accumulation.optimizers:
                optimizer.begin_last_batch()
        if accumulation.sync_gradients or accumulation.plugin.sync_each_batch:
            return
        self._stack = ExitStack()
        for each in self._models:
            for model in (each,) if isinstance(each, torch.nn.Module) else each:
                self._stack.enter_context(self._sync(model, False))

    def __exit__(self, *exception: object) -> None:
        self._accumulation.inside = self._outer
        if self._is_last:
            for optimizer in self._accumulation.optimizers:
                optimizer.end_last_batch()
        if self._stack is not None:
            self._stack.__exit__(*exception)  # type: ignore[arg-type]


def current_accumulation() -> Accumulation:
    """Return the windows of this rank's newest ``Accelerator``, else of the environment."""
    shared = current().shared
    if _CURRENT not in shared:
        shared[_CURRENT] = Accumulation(resolve_plugin(None, None))
    accumulation: Accumulation = shared[_CURRENT]
    return accumulation


def forget_accumulation() -> None:
    """Forget the current windows: the next ones have the environment's settings."""
    current().shared.pop(_CURRENT, None)


def resolve_plugin(
    num_steps: int | None, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin:
    """Return the settings of the windows: an argument, else the environment, else 1 batch.

    Raises:
        ConfigError: the number makes no sense.
    """
    in_environment = environment.read_count("GRADIENT_ACCUMULATION_STEPS")
    if num_steps is not None:
        plugin = GradientAccumulationPlugin(
            num_steps=as_steps("gradient_accumulation_steps", num_steps)
        )
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=in_environment or 1)
    if in_environment is not None and in_environment != plugin.num_steps:
        notice_once(
            "accumulation",
            f"gradient_accumulation_steps={plugin.num_steps} of the code is used, not the "
            f"environment's {in_environment}",
        )
    return plugin
