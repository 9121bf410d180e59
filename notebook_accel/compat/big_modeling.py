"""Makes ``notebook_accel.big_modeling`` a counterpart of ``accelerate.big_modeling``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate

from .state import *
from .utils import *

__getattr__ = _accelerate.door("big_modeling")
