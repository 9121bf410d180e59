"""Door: ``accelerate.optimizer`` under our name."""

from notebook_accel.training.optimizer import (
    AcceleratedOptimizer,
)

__all__ = [
    "AcceleratedOptimizer",
]
