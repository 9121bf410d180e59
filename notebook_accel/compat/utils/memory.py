"""Door: ``accelerate.utils.memory`` under our name, with what it has imported there."""

from notebook_accel.training.memory import clear_device_cache as clear_device_cache
from notebook_accel.training.memory import find_executable_batch_size as find_executable_batch_size
from notebook_accel.training.memory import is_out_of_memory as should_reduce_batch_size
from notebook_accel.training.memory import release_memory as release_memory

from .imports import *
