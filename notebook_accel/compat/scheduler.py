"""A counterpart of ``accelerate.scheduler``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.stepping.optimizer import AcceleratedScheduler

from .state import *

__getattr__ = _accelerate.door("scheduler")
