"""Door: ``accelerate.scheduler`` under our name, with what it has imported there."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.stepping.scheduler import AcceleratedScheduler

from .state import *

__getattr__ = _accelerate.door("scheduler")
