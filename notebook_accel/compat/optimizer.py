"""A counterpart of ``accelerate.optimizer``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer

from .state import *
from .utils import *

__getattr__ = _accelerate.door("optimizer")
