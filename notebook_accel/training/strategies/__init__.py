"""The one table of strategies: a new kind is a file, and one line here.

What the user asked (plugins, settings, environment) and the number of ranks are a
:class:`~notebook_accel.training.strategies.base.Request`; the first strategy of the table that it
asks for is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel.training.strategies.base import ModelToPrepare, PrepareCall, Request, Strategy
from notebook_accel.training.strategies.ddp import DataParallel
from notebook_accel.training.strategies.single import SingleDevice

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = [
    "STRATEGIES",
    "ModelToPrepare",
    "PrepareCall",
    "Request",
    "Strategy",
    "make_strategy",
    "unwrap",
]

# In order: what was asked for by name comes before what follows from the number of ranks.
STRATEGIES: dict[str, type[Strategy]] = {
    "ddp": DataParallel,
    "single": SingleDevice,
}
_FOREIGN_WRAPPERS = ("torch.nn.parallel.data_parallel.DataParallel",)


def make_strategy(request: Request) -> Strategy:
    """The strategy for what the user asked."""
    return next(kind for kind in STRATEGIES.values() if kind.is_asked_for(request))(request)


def unwrap(model: Module) -> Module:
    """The model inside all wrappers that strategies put around models."""
    names = {name for kind in STRATEGIES.values() for name in kind.wrappers}
    names.update(_FOREIGN_WRAPPERS)
    while names & {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}:
        model = model.module  # type: ignore[assignment]
    return model
