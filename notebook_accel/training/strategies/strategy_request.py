"""The inputs of a strategy: the user's settings, the objects of a ``prepare`` call, and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from notebook_accel.training.precision import Precision
from notebook_accel.training.processes.topology import Topology
from notebook_accel.training.settings.handlers import DataLoaderConfiguration, KwargsHandler
from notebook_accel.training.stepping.accumulation import Accumulation
from notebook_accel.training.strategies.compiling import TorchDynamoPlugin

LossFunction = Callable[[Any, Any], torch.Tensor]
"""From outputs and targets to the loss, as ``forward_backward`` takes it."""


@dataclass(kw_only=True)
class Request:
    """The settings of one ``Accelerator``, by which its strategy is chosen and made."""

    topology: Topology
    precision: Precision
    handlers: list[KwargsHandler]
    plugins: Mapping[str, Any]
    """The plugins in use, by the arguments of ``Accelerator``: ``plugins["fsdp_plugin"]``."""
    dynamo: TorchDynamoPlugin
    accumulation: Accumulation
    """The windows, for a strategy whose library exchanges gradients by them."""
    loaders: DataLoaderConfiguration
    device_placement: bool
    step_scheduler_with_optimizer: bool
    rng_types: tuple[str, ...] | None

    @property
    def mesh_dims(self) -> set[str]:
        """The dimensions with several ranks that ``parallelism_config`` asks for."""
        asked = self.plugins.get("parallelism_config")
        return set() if asked is None else set(asked.active_mesh_dims)


@dataclass
class ModelToPrepare:
    """A model that was passed to ``prepare``, and how it is to be prepared."""

    model: Module
    training: bool = True
    """False for a model that is only evaluated."""
    device: torch.device | None = None
    """Where to put it; None leaves it where it is."""


@dataclass
class PrepareCall:
    """All objects of one ``prepare`` call; DeepSpeed needs them together."""

    models: list[Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    schedule_steps: int = 1
    """By how much a schedule moves with a step of its optimizer."""
    batch_sizes: list[int] = field(default_factory=list)
    """Samples of a rank's batch, for each loader that knows its batch size."""


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call ``model`` with a batch: one argument, a tuple of arguments, or a mapping of keywords."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
