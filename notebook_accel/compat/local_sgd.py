"""Door: ``accelerate.local_sgd`` under our name, with what it has imported there."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.accelerator import Accelerator
from notebook_accel.training.functions.local_sgd import LocalSGD

from .state import *

__getattr__ = _accelerate.door("local_sgd")
