"""Door: ``accelerate.logging`` under our name."""

from notebook_accel.training.logs import MultiProcessAdapter as MultiProcessAdapter
from notebook_accel.training.logs import get_logger as get_logger
