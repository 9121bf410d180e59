"""Door: ``accelerate.tracking`` under our name."""

from notebook_accel.training.tracking.aim import (
    AimTracker,
)
from notebook_accel.training.tracking.base import (
    GeneralTracker,
    on_main_process,
)
from notebook_accel.training.tracking.clearml import (
    ClearMLTracker,
)
from notebook_accel.training.tracking.comet_ml import (
    CometMLTracker,
)
from notebook_accel.training.tracking.dvclive import (
    DVCLiveTracker,
)
from notebook_accel.training.tracking.mlflow import (
    MLflowTracker,
)
from notebook_accel.training.tracking.registry import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from notebook_accel.training.tracking.swanlab import (
    SwanLabTracker,
)
from notebook_accel.training.tracking.tensorboard import (
    TensorBoardTracker,
)
from notebook_accel.training.tracking.trackio import (
    TrackioTracker,
)
from notebook_accel.training.tracking.wandb import (
    WandBTracker,
)

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
