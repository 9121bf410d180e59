"""Makes ``notebook_accel.optimizer`` a counterpart of ``accelerate.optimizer``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer

from .state import *
from .utils import *

__getattr__ = _accelerate.door("optimizer")
