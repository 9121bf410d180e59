"""Door: ``accelerate.tracking`` under our name, with what it has imported there."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.tracking.base import GeneralTracker, on_main_process
from notebook_accel.training.tracking.mlflow import MLflowTracker
from notebook_accel.training.tracking.registry import (
    LOGGER_TYPE_TO_CLASS,
    get_available_trackers,
    register_tracker_class,
)
from notebook_accel.training.tracking.tensorboard import TensorBoardTracker
from notebook_accel.training.tracking.wandb import WandBTracker

from .logging import *
from .state import *
from .utils import *

__getattr__ = _accelerate.door("tracking")
