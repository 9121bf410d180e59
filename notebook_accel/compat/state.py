"""A counterpart of ``accelerate.state``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.settings.handlers import DistributedType
from notebook_accel.training.state import AcceleratorState, PartialState, is_initialized
from notebook_accel.training.stepping.accumulation import GradientState

from .utils import *

__getattr__ = _accelerate.door("state")
