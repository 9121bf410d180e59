"""Door: ``accelerate.state`` under our name, with what it has imported there."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.settings import DistributedType
from notebook_accel.training.state import (
    AcceleratorState,
    GradientState,
    PartialState,
    is_initialized,
)

from .utils import *

__getattr__ = _accelerate.door("state")
