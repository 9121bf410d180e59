"""Door: ``accelerate.utils.other`` under our name, with what it has imported there."""

from notebook_accel.config import write_basic_config as write_basic_config
from notebook_accel.training.big_modeling.sizes import convert_bytes as convert_bytes
from notebook_accel.training.checkpoint.weights import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
)
from notebook_accel.training.compiling import compile_regions as compile_regions
from notebook_accel.training.compiling import compile_regions_in_place as compile_regions_deepspeed
from notebook_accel.training.compiling import compile_regions_in_place as compile_regions_fsdp2
from notebook_accel.training.compiling import has_compiled_regions as has_compiled_regions
from notebook_accel.training.compiling import is_compiled_module as is_compiled_module
from notebook_accel.training.host import check_os_kernel as check_os_kernel
from notebook_accel.training.host import get_free_port as get_free_port
from notebook_accel.training.host import is_port_in_use as is_port_in_use
from notebook_accel.training.logs import get_logger as get_logger
from notebook_accel.training.model_parts import get_model_tp_size as get_model_tp_size
from notebook_accel.training.model_parts import (
    get_module_children_bottom_up as get_module_children_bottom_up,
)
from notebook_accel.training.model_parts import get_pretty_name as get_pretty_name
from notebook_accel.training.model_parts import is_peft_model as is_peft_model
from notebook_accel.training.model_parts import model_has_dtensor as model_has_dtensor
from notebook_accel.training.model_parts import recursive_getattr as recursive_getattr
from notebook_accel.training.nested import merge_dicts as merge_dicts
from notebook_accel.training.prepare import (
    extract_model_from_parallel as extract_model_from_parallel,
)
from notebook_accel.training.saving import load as load
from notebook_accel.training.saving import save as save
from notebook_accel.training.state import PartialState as PartialState
from notebook_accel.training.topology import barrier as wait_for_everyone

from .constants import *
from .dataclasses import *
from .environment import *
from .imports import *
from .modeling import id_tensor_storage as id_tensor_storage
from .transformer_engine import convert_model as convert_model
from .versions import *
