"""Door: ``accelerate.logging`` under our name."""

from notebook_accel.training.logs import (
    MultiProcessAdapter,
    get_logger,
)

__all__ = [
    "MultiProcessAdapter",
    "get_logger",
]
