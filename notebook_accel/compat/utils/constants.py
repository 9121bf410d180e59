"""Door: ``accelerate.utils.constants`` under our name."""

from notebook_accel.training.big_modeling.layerwise_casting import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
from notebook_accel.training.checkpoint.file_names import *
from notebook_accel.training.constants import *
from notebook_accel.training.versions import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
