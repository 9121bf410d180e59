"""Door: ``accelerate.parallelism_config`` under our name, with what it has imported there."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.settings.parallelism import ParallelismConfig

from .utils import *

__getattr__ = _accelerate.door("parallelism_config")
