"""A counterpart of ``accelerate.tracking``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.tracking.base import GeneralTracker, on_main_process
from notebook_accel.training.tracking.registry import *

from .logging import *
from .state import *
from .utils import *

__getattr__ = _accelerate.door("tracking")
