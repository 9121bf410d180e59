"""Door: ``accelerate.utils.deepspeed`` under our name, with what it has imported there."""

from notebook_accel.training.deepspeed_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from notebook_accel.training.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from notebook_accel.training.placeholders import DummyOptim as DummyOptim
from notebook_accel.training.placeholders import DummyScheduler as DummyScheduler
from notebook_accel.training.scheduler import AcceleratedScheduler as AcceleratedScheduler
from notebook_accel.training.state import (
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from notebook_accel.training.strategies.zero_engine import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
)
from notebook_accel.training.strategies.zero_engine import (
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
)
from notebook_accel.training.strategies.zero_engine import (
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
from notebook_accel.training.strategies.zero_engine import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)

from .dataclasses import *
from .imports import *
from .versions import *
