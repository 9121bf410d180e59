"""Door: ``accelerate.launchers`` under our name, whose import brings no torch."""

from notebook_accel.notebook.launcher import debug_launcher, notebook_launcher
