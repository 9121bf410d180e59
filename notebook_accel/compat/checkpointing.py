"""A counterpart of ``accelerate.checkpointing``."""

from notebook_accel.compat import _accelerate

from .logging import *
from .state import *
from .utils import *

__getattr__ = _accelerate.door("checkpointing")
