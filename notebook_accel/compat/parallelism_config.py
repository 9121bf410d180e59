"""Door: ``accelerate.parallelism_config`` under our name, with what it has imported there."""

from notebook_accel.compat._accelerate import door
from notebook_accel.training.parallelism import ParallelismConfig

from .utils import *

__getattr__ = door("parallelism_config")
