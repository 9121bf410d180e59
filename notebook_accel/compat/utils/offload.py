"""Door: ``accelerate.utils.offload`` under our name."""

from notebook_accel.training.big_modeling.offload_store import *
