"""Door: ``accelerate.utils.constants`` under our name."""

from notebook_accel.training.checkpoint.file_names import *
from notebook_accel.training.constants import *
