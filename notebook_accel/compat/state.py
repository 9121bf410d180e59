"""Door: ``accelerate.state`` under our name."""

from notebook_accel.training.settings import (
    DistributedType,
)
from notebook_accel.training.state import (
    AcceleratorState,
    GradientState,
    PartialState,
)

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
]
