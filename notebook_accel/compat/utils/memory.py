"""Door: ``accelerate.utils.memory`` under our name."""

from notebook_accel.compat._accelerate import door

from . import *

__getattr__ = door("utils.memory")
