"""Makes ``notebook_accel.logging`` a counterpart of ``accelerate.logging``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate
from notebook_accel.training.processes.logs import MultiProcessAdapter, get_logger

from .state import *

__getattr__ = _accelerate.door("logging")
