"""A counterpart of ``accelerate.launchers``; importing it does not import torch."""

from notebook_accel.notebook.launcher import debug_launcher, notebook_launcher
