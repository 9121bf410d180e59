"""Door: ``accelerate.optimizer`` under our name."""

from notebook_accel.training.nested import move_to_device as move_to_device
from notebook_accel.training.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
