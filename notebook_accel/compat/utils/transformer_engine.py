"""Door: ``accelerate.utils.transformer_engine`` under our name, with what it has imported there."""

from notebook_accel.training.model_parts import (
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from notebook_accel.training.refused import apply_fp8_autowrap as apply_fp8_autowrap
from notebook_accel.training.refused import contextual_fp8_autocast as contextual_fp8_autocast
from notebook_accel.training.refused import convert_model as convert_model

from .imports import *
from .operations import *
