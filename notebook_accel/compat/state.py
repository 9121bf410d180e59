"""Makes ``notebook_accel.state`` a counterpart of ``accelerate.state``.

That module has this package's versions of names that Accelerate's module defines or imports. Other
names come from Accelerate, if it is installed (see ``_accelerate.door``).
"""

from notebook_accel.compat import _accelerate
from notebook_accel.training.settings.handlers import DistributedType
from notebook_accel.training.state import AcceleratorState, PartialState, is_initialized
from notebook_accel.training.stepping.gradient_state import GradientState

from .utils import *

__getattr__ = _accelerate.door("state")
