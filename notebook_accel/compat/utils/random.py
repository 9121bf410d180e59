"""Door: ``accelerate.utils.random`` under our name, with what it has imported there."""

from notebook_accel.training.seeding import *
from notebook_accel.training.state import AcceleratorState as AcceleratorState

from .constants import *
from .dataclasses import *
from .imports import *
