"""Door: ``accelerate.utils.imports`` under our name, with what it has imported there."""

from notebook_accel.training.availability import *
from notebook_accel.training.float8 import torchao_required as torchao_required
from notebook_accel.training.state import deepspeed_required as deepspeed_required

from .environment import *
from .versions import *
