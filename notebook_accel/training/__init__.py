"""The code that runs inside each rank (training process): the ``Accelerator`` and its parts.

It imports torch and never IPython, so that scripts can use it without a notebook.
"""

from notebook_accel.config.checks import too_old_torch

if _too_old := too_old_torch():
    raise ImportError(_too_old)
