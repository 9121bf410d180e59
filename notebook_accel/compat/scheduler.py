"""Door: ``accelerate.scheduler`` under our name."""

from notebook_accel.training.scheduler import AcceleratedScheduler as AcceleratedScheduler
