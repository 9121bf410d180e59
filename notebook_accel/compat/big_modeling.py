"""Door: ``accelerate.big_modeling`` under our name, with what it has imported there."""

from notebook_accel.compat._accelerate import door

from .state import *
from .utils import *

__getattr__ = door("big_modeling")
