"""A counterpart of ``accelerate.hooks``."""

from notebook_accel.compat import _accelerate

from .state import *
from .utils import *

__getattr__ = _accelerate.door("hooks")
