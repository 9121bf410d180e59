"""Door: ``accelerate.utils.bnb`` under our name, with what it has imported there."""

from notebook_accel.training.big_modeling.dispatch import dispatch_model as dispatch_model
from notebook_accel.training.big_modeling.empty_weights import (
    init_empty_weights as init_empty_weights,
)
from notebook_accel.training.big_modeling.quantized import (
    has_4bit_bnb_layers as has_4bit_bnb_layers,
)
from notebook_accel.training.big_modeling.quantized import (
    load_and_quantize_model as load_and_quantize_model,
)

from .dataclasses import *
from .imports import *
from .modeling import *
from .offload import *
