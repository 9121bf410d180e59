"""Door: ``accelerate.parallelism_config`` under our name, with what it has imported there."""

from notebook_accel.training.parallelism import ParallelismConfig as ParallelismConfig

from .utils.dataclasses import *
from .utils.versions import *
