"""Door: ``accelerate.launchers`` under our name, whose import brings no torch."""

from notebook_accel.notebook.debugging import debug_launcher
from notebook_accel.notebook.launcher import notebook_launcher
