"""A counterpart of ``accelerate.accelerator``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.accelerator import Accelerator

from .checkpointing import *
from .data_loader import *
from .logging import *
from .optimizer import *
from .parallelism_config import *
from .scheduler import *
from .state import *
from .tracking import *
from .utils import *

__getattr__ = _accelerate.door("accelerator")
