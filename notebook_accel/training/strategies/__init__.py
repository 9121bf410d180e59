"""The one table of strategies: a new kind is a file, and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.training.strategies.base import Strategy
from notebook_accel.training.strategies.ddp import DataParallel
from notebook_accel.training.strategies.single import SingleDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module

    from notebook_accel.training.settings import KwargsHandler
    from notebook_accel.training.topology import Topology

__all__ = ["STRATEGIES", "Strategy", "make_strategy", "unwrap"]

STRATEGIES: dict[str, type[Strategy]] = {
    "single": SingleDevice,
    "ddp": DataParallel,
}
_FOREIGN_WRAPPERS = ("torch.nn.parallel.data_parallel.DataParallel",)


def make_strategy(place: Topology, handlers: Sequence[KwargsHandler] = ()) -> Strategy:
    """The strategy for ranks that stand like this."""
    name = "ddp" if place.num_processes > 1 else "single"
    return STRATEGIES[name](place, handlers)


def unwrap(model: Module) -> Module:
    """The model inside all wrappers that strategies put around models."""
    names = {name for kind in STRATEGIES.values() for name in kind.wrappers}
    names.update(_FOREIGN_WRAPPERS)
    while _qualified_names(model) & names:
        model = model.module  # type: ignore[assignment]
    return model


def _qualified_names(model: Module) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
