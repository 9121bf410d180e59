"""Makes ``notebook_accel.checkpointing`` a counterpart of ``accelerate.checkpointing``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate

from .logging import *
from .state import *
from .utils import *

__getattr__ = _accelerate.door("checkpointing")
