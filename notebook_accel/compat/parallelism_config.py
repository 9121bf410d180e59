"""Makes ``notebook_accel.parallelism_config`` a counterpart of ``accelerate.parallelism_config``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate
from notebook_accel.training.settings.parallelism import ParallelismConfig

from .utils import *

__getattr__ = _accelerate.door("parallelism_config")
