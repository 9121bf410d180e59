"""Makes ``notebook_accel.local_sgd`` a counterpart of ``accelerate.local_sgd``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate
from notebook_accel.training.accelerator import Accelerator
from notebook_accel.training.functions.local_sgd import LocalSGD

from .state import *

__getattr__ = _accelerate.door("local_sgd")
