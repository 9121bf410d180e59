"""One device: every method has the meaning that the base class gives it."""

from __future__ import annotations

from notebook_accel.training.strategies.base import Strategy

__all__ = ["SingleDevice"]


class SingleDevice(Strategy):
    """Nothing is spread: one process has everything."""
