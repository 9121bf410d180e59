"""A model as ``prepare`` gave it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module


__all__ = ["PreparedModel"]


@dataclass(frozen=True)
class PreparedModel:
    """A model, and what the user calls instead.

    Attributes:
        inner: the model.
        wrapped: what the user calls.
        training: whether it is trained.
        blueprint: the model without weights, as it was before the strategy spread it; None where it
            did not.
    """

    inner: Module
    wrapped: Module
    training: bool
    blueprint: Module | None = None
