"""Door: ``accelerate.launchers`` under our name."""

from notebook_accel.notebook.debugging import (
    debug_launcher,
)
from notebook_accel.notebook.launcher import (
    notebook_launcher,
)

__all__ = [
    "debug_launcher",
    "notebook_launcher",
]
