"""Door: ``accelerate.hooks`` under our name, with what it has imported there."""

from notebook_accel.training.big_modeling.align_devices import AlignDevicesHook as AlignDevicesHook
from notebook_accel.training.big_modeling.align_devices import (
    attach_align_device_hook as attach_align_device_hook,
)
from notebook_accel.training.big_modeling.align_devices import (
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
)
from notebook_accel.training.big_modeling.align_devices import (
    attach_execution_device_hook as attach_execution_device_hook,
)
from notebook_accel.training.big_modeling.hooks import ModelHook as ModelHook
from notebook_accel.training.big_modeling.hooks import SequentialHook as SequentialHook
from notebook_accel.training.big_modeling.hooks import add_hook_to_module as add_hook_to_module
from notebook_accel.training.big_modeling.hooks import (
    remove_hook_from_module as remove_hook_from_module,
)
from notebook_accel.training.big_modeling.hooks import (
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from notebook_accel.training.big_modeling.layerwise_casting import (
    LayerwiseCastingHook as LayerwiseCastingHook,
)
from notebook_accel.training.big_modeling.offload_on_call import CpuOffload as CpuOffload
from notebook_accel.training.big_modeling.offload_on_call import (
    UserCpuOffloadHook as UserCpuOffloadHook,
)

from .state import *
from .utils import *
