"""Door: ``accelerate.big_modeling`` under our name, with what it has imported there."""

from notebook_accel.training.big_modeling.dispatch import cpu_offload as cpu_offload
from notebook_accel.training.big_modeling.dispatch import disk_offload as disk_offload
from notebook_accel.training.big_modeling.dispatch import dispatch_model as dispatch_model
from notebook_accel.training.big_modeling.empty_weights import (
    init_empty_weights as init_empty_weights,
)
from notebook_accel.training.big_modeling.empty_weights import init_on_device as init_on_device
from notebook_accel.training.big_modeling.inference import (
    infer_auto_device_map as infer_auto_device_map,
)
from notebook_accel.training.big_modeling.layerwise_casting import (
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
)
from notebook_accel.training.big_modeling.loading import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
from notebook_accel.training.big_modeling.loading import (
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from notebook_accel.training.big_modeling.offload_on_call import (
    cpu_offload_with_hook as cpu_offload_with_hook,
)

from .hooks import *
from .utils import *
