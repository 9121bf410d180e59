"""Door: ``accelerate.inference`` under our name, with what it has imported there."""

from notebook_accel.compat import _accelerate

from .state import *
from .utils import *

__getattr__ = _accelerate.door("inference")
