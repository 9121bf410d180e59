"""Door: ``accelerate.utils.imports`` under our name."""

from notebook_accel.training.availability import *
