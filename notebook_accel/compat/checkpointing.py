"""Door: ``accelerate.checkpointing`` under our name, with the file names that it has imported."""

from notebook_accel.training.checkpoint.by_hand import (
    load_accelerator_state as load_accelerator_state,
)
from notebook_accel.training.checkpoint.by_hand import load_custom_state as load_custom_state
from notebook_accel.training.checkpoint.by_hand import (
    save_accelerator_state as save_accelerator_state,
)
from notebook_accel.training.checkpoint.by_hand import save_custom_state as save_custom_state

from .logging import *
from .state import *
from .utils import *
