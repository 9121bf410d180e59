"""Door: ``accelerate.accelerator`` under our name, with what it has imported itself there."""

from notebook_accel.training.accelerator import Accelerator as Accelerator
from notebook_accel.training.tracking.registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS

from .checkpointing import *
from .data_loader import *
from .logging import get_logger as get_logger
from .optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from .parallelism_config import ParallelismConfig as ParallelismConfig
from .scheduler import AcceleratedScheduler as AcceleratedScheduler
from .state import *
from .tracking import *
from .utils import *
