"""Door: ``accelerate.tracking`` under our name, with what it has imported there."""

from notebook_accel.training.tracking.aim import AimTracker as AimTracker
from notebook_accel.training.tracking.base import GeneralTracker as GeneralTracker
from notebook_accel.training.tracking.base import on_main_process as on_main_process
from notebook_accel.training.tracking.clearml import ClearMLTracker as ClearMLTracker
from notebook_accel.training.tracking.comet_ml import CometMLTracker as CometMLTracker
from notebook_accel.training.tracking.dvclive import DVCLiveTracker as DVCLiveTracker
from notebook_accel.training.tracking.mlflow import MLflowTracker as MLflowTracker
from notebook_accel.training.tracking.registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from notebook_accel.training.tracking.registry import filter_trackers as filter_trackers
from notebook_accel.training.tracking.registry import (
    get_available_trackers as get_available_trackers,
)
from notebook_accel.training.tracking.registry import (
    register_tracker_class as register_tracker_class,
)
from notebook_accel.training.tracking.swanlab import SwanLabTracker as SwanLabTracker
from notebook_accel.training.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
from notebook_accel.training.tracking.trackio import TrackioTracker as TrackioTracker
from notebook_accel.training.tracking.wandb import WandBTracker as WandBTracker

from .logging import *
from .state import *
from .utils import *
