"""Makes ``notebook_accel.launchers`` a counterpart of ``accelerate.launchers``.

Importing it does not import torch.
"""

from notebook_accel.notebook.launcher import debug_launcher, notebook_launcher
