"""Door: ``accelerate.utils.modeling`` under our name, with what it has imported there."""

from notebook_accel.training.big_modeling.align_devices import (
    align_module_device as align_module_device,
)
from notebook_accel.training.big_modeling.align_devices import (
    has_offloaded_params as has_offloaded_params,
)
from notebook_accel.training.big_modeling.device_map import check_device_map as check_device_map
from notebook_accel.training.big_modeling.device_map import clean_device_map as clean_device_map
from notebook_accel.training.big_modeling.dispatch import (
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
)
from notebook_accel.training.big_modeling.dtypes import dtype_byte_size as dtype_byte_size
from notebook_accel.training.big_modeling.inference import (
    infer_auto_device_map as infer_auto_device_map,
)
from notebook_accel.training.big_modeling.loading import (
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from notebook_accel.training.big_modeling.loading import (
    load_offloaded_weights as load_offloaded_weights,
)
from notebook_accel.training.big_modeling.loading import load_state_dict as load_state_dict
from notebook_accel.training.big_modeling.memory_limits import (
    get_balanced_memory as get_balanced_memory,
)
from notebook_accel.training.big_modeling.memory_limits import get_max_memory as get_max_memory
from notebook_accel.training.big_modeling.sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes,
)
from notebook_accel.training.big_modeling.sizes import compute_module_sizes as compute_module_sizes
from notebook_accel.training.big_modeling.sizes import (
    compute_module_total_buffer_size as compute_module_total_buffer_size,
)
from notebook_accel.training.big_modeling.sizes import (
    convert_file_size_to_int as convert_file_size_to_int,
)
from notebook_accel.training.big_modeling.sizes import get_max_layer_size as get_max_layer_size
from notebook_accel.training.big_modeling.sizes import get_module_leaves as get_module_leaves
from notebook_accel.training.big_modeling.tensors import check_device_same as check_device_same
from notebook_accel.training.big_modeling.tensors import id_tensor_storage as id_tensor_storage
from notebook_accel.training.big_modeling.tensors import (
    named_module_tensors as named_module_tensors,
)
from notebook_accel.training.big_modeling.tensors import (
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from notebook_accel.training.mixed_precision import get_grad_scaler as get_grad_scaler
from notebook_accel.training.mixed_precision import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from notebook_accel.training.model_parts import is_peft_model as is_peft_model
from notebook_accel.training.state import AcceleratorState as AcceleratorState
from notebook_accel.training.ties import (
    check_tied_parameters_in_config as check_tied_parameters_in_config,
)
from notebook_accel.training.ties import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from notebook_accel.training.ties import find_tied_parameters as find_tied_parameters
from notebook_accel.training.ties import retie_parameters as retie_parameters

from .constants import *
from .dataclasses import *
from .imports import *
from .memory import *
from .offload import *
from .tqdm import *
from .versions import *
