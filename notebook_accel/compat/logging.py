"""Door: ``accelerate.logging`` under our name, with what it has imported there."""

from notebook_accel.training.logs import MultiProcessAdapter as MultiProcessAdapter
from notebook_accel.training.logs import get_logger as get_logger

from .state import *
