"""Door: ``accelerate.utils.fsdp_utils`` under our name, with what it has imported there."""

from notebook_accel.training.checkpoint.merge import merge_fsdp_weights as merge_fsdp_weights
from notebook_accel.training.environment import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from notebook_accel.training.environment import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from notebook_accel.training.fsdp_functions import *
from notebook_accel.training.logs import get_logger as get_logger
from notebook_accel.training.mixed_precision import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from notebook_accel.training.model_parts import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from notebook_accel.training.ties import ensure_weights_retied as ensure_weights_retied

from .constants import *
from .modeling import *
from .other import *
from .versions import *
