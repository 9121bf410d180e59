"""Door: ``accelerate.utils.versions`` under our name."""

from notebook_accel.training.availability import (
    compare_versions,
    is_torch_version,
)

__all__ = [
    "compare_versions",
    "is_torch_version",
]
