"""Models that are larger than one device's memory.

From the measuring to the running: ``sizes`` says what a model weighs, ``memory_limits`` what each
device may hold, ``inference`` turns the two into a device map (module name -> device),
``loading`` and ``offload_store`` bring weights there, and ``dispatch`` attaches the ``hooks`` that
fetch a module's weights when its forward runs.
"""

from notebook_accel.training.big_modeling.dispatch import cpu_offload, disk_offload, dispatch_model
from notebook_accel.training.big_modeling.empty_weights import init_empty_weights, init_on_device
from notebook_accel.training.big_modeling.inference import infer_auto_device_map
from notebook_accel.training.big_modeling.loading import (
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from notebook_accel.training.big_modeling.offload_on_call import cpu_offload_with_hook

__all__ = [
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
