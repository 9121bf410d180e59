"""Makes ``notebook_accel.scheduler`` a counterpart of ``accelerate.scheduler``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate
from notebook_accel.training.stepping.scheduler import AcceleratedScheduler

from .state import *

__getattr__ = _accelerate.door("scheduler")
