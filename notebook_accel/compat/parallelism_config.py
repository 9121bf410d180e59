"""A counterpart of ``accelerate.parallelism_config``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.settings.parallelism import ParallelismConfig

from .utils import *

__getattr__ = _accelerate.door("parallelism_config")
