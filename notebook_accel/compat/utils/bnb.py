"""Door: ``accelerate.utils.bnb`` under our name."""

from notebook_accel.training.big_modeling.quantized import (
    has_4bit_bnb_layers as has_4bit_bnb_layers,
)
from notebook_accel.training.big_modeling.quantized import (
    load_and_quantize_model as load_and_quantize_model,
)
