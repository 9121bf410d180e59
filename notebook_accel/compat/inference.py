"""A counterpart of ``accelerate.inference``."""

from notebook_accel.compat import _accelerate

from .state import *
from .utils import *

__getattr__ = _accelerate.door("inference")
