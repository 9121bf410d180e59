"""Door: ``accelerate.checkpointing`` under our name, with what it has imported there."""

from notebook_accel.compat._accelerate import door
from notebook_accel.training.checkpoint.by_hand import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)

from .logging import *
from .state import *
from .utils import *

__getattr__ = door("checkpointing")
