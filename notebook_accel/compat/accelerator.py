"""Door: ``accelerate.accelerator`` under our name."""

from notebook_accel.training.accelerator import (
    Accelerator,
)

__all__ = [
    "Accelerator",
]
