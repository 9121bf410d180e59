"""One device: every method has the meaning that the base classes give it."""

from __future__ import annotations

from notebook_accel.training.strategies.spread_models import TakesSpreadModels

__all__ = ["SingleDevice"]


class SingleDevice(TakesSpreadModels):
    """Training in one process: ``prepare`` spreads nothing."""
