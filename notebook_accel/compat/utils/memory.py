"""Door: ``accelerate.utils.memory`` under our name."""

from notebook_accel.training.memory import (
    find_executable_batch_size,
    release_memory,
)

__all__ = [
    "find_executable_batch_size",
    "release_memory",
]
