"""Door: ``accelerate.optimizer`` under our name, with what it has imported there."""

from notebook_accel.training.nested import move_to_device as move_to_device
from notebook_accel.training.optimizer import AcceleratedOptimizer as AcceleratedOptimizer

from .state import *
from .utils import *
