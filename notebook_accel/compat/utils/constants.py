"""Door: ``accelerate.utils.constants`` under our name."""

from notebook_accel.training.checkpoint.file_names import *
