"""Door: ``accelerate.utils.fsdp_utils`` under our name."""

from notebook_accel.training.big_modeling.ties import ensure_weights_retied as ensure_weights_retied
from notebook_accel.training.environment import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from notebook_accel.training.environment import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
