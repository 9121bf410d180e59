"""Makes ``notebook_accel.launchers`` a counterpart of ``accelerate.launchers``, without torch."""

from notebook_accel.notebook.launcher import debug_launcher, notebook_launcher
