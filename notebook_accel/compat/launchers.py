"""Door: ``accelerate.launchers`` under our name."""

from notebook_accel.notebook.debugging import debug_launcher as debug_launcher
from notebook_accel.notebook.launcher import notebook_launcher as notebook_launcher
