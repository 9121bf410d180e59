"""Door: ``accelerate.utils`` under our name: all that the doors beside it have."""

from notebook_accel.training.parallelism import ParallelismConfig as ParallelismConfig

from .ao import *
from .bnb import *
from .constants import *
from .dataclasses import *
from .deepspeed import *
from .environment import *
from .fsdp_utils import *
from .imports import *
from .memory import *
from .modeling import *
from .offload import *
from .operations import *
from .other import *
from .random import *
from .tqdm import tqdm as tqdm
from .versions import *
