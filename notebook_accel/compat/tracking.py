"""Makes ``notebook_accel.tracking`` a counterpart of ``accelerate.tracking``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate
from notebook_accel.training.tracking.base import GeneralTracker, on_main_process
from notebook_accel.training.tracking.registry import *

from .logging import *
from .state import *
from .utils import *

__getattr__ = _accelerate.door("tracking")
