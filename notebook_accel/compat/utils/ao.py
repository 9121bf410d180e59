"""Door: ``accelerate.utils.ao`` under our name, with what it has imported there."""

from notebook_accel.training.float8 import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from notebook_accel.training.float8 import (
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
)
from notebook_accel.training.float8 import filter_linear_layers as filter_linear_layers
from notebook_accel.training.float8 import (
    find_first_last_linear_layers as find_first_last_linear_layers,
)
from notebook_accel.training.float8 import has_ao_layers as has_ao_layers

from .imports import *
