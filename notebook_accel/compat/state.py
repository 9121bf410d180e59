"""Door: ``accelerate.state`` under our name, with what it has imported there."""

from notebook_accel.training.settings import DistributedType as DistributedType
from notebook_accel.training.state import AcceleratorState as AcceleratorState
from notebook_accel.training.state import GradientState as GradientState
from notebook_accel.training.state import PartialState as PartialState
from notebook_accel.training.state import do_nothing as do_nothing
from notebook_accel.training.state import is_initialized as is_initialized

from .utils import *
