"""Door: ``accelerate.scheduler`` under our name, with what it has imported there."""

from notebook_accel.compat._accelerate import door
from notebook_accel.training.scheduler import AcceleratedScheduler

from .state import *

__getattr__ = door("scheduler")
