"""A counterpart of ``accelerate.tracking``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.tracking import *
from notebook_accel.training.tracking.tracker import GeneralTracker, on_main_process

from .logging import *
from .state import *
from .utils import *

__getattr__ = _accelerate.door("tracking")
