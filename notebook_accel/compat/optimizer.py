"""Door: ``accelerate.optimizer`` under our name."""

from notebook_accel.training.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
