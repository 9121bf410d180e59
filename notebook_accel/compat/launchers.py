"""Door: ``accelerate.launchers`` under our name."""

from notebook_accel import (
    notebook_launcher,
)

__all__ = [
    "notebook_launcher",
]
