"""Door: ``accelerate.scheduler`` under our name, with what it has imported there."""

from notebook_accel.training.scheduler import AcceleratedScheduler as AcceleratedScheduler

from .state import *
