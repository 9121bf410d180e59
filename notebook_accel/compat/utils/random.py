"""Door: ``accelerate.utils.random`` under our name."""

from notebook_accel.training.seeding import *
