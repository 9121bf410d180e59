"""Makes ``notebook_accel.inference`` a counterpart of ``accelerate.inference``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate

from .state import *
from .utils import *

__getattr__ = _accelerate.door("inference")
