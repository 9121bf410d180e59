"""A counterpart of ``accelerate.local_sgd``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.accelerator import Accelerator
from notebook_accel.training.local_sgd import LocalSGD

from .state import *

__getattr__ = _accelerate.door("local_sgd")
