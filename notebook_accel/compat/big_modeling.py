"""A counterpart of ``accelerate.big_modeling``."""

from notebook_accel.compat import _accelerate

from .state import *
from .utils import *

__getattr__ = _accelerate.door("big_modeling")
