"""A counterpart of ``accelerate.logging``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.processes.logs import MultiProcessAdapter, get_logger

from .state import *

__getattr__ = _accelerate.door("logging")
