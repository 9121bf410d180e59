"""Door: ``accelerate.checkpointing`` under our name, with what it has imported there."""

from notebook_accel.compat._accelerate import door

from .logging import *
from .state import *
from .utils import *

__getattr__ = door("checkpointing")
