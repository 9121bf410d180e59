"""Door: ``accelerate.optimizer`` under our name, with what it has imported there."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer

from .state import *
from .utils import *

__getattr__ = _accelerate.door("optimizer")
