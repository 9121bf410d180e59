"""Door: ``accelerate.hooks`` under our name."""

from notebook_accel.training.big_modeling.align_devices import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from notebook_accel.training.big_modeling.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from notebook_accel.training.big_modeling.layerwise_casting import (
    LayerwiseCastingHook,
)
from notebook_accel.training.big_modeling.offload_on_call import (
    CpuOffload,
    UserCpuOffloadHook,
)

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
