"""Door: ``accelerate.parallelism_config`` under our name."""

from notebook_accel.training.parallelism import ParallelismConfig as ParallelismConfig
