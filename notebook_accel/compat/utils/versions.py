"""Door: ``accelerate.utils.versions`` under our name."""

from notebook_accel.training.versions import *
