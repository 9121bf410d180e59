"""Door: ``accelerate.utils.launch`` under our name, with what it has imported there."""

from notebook_accel.training.refused import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from notebook_accel.training.refused import (
    prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config,
)
from notebook_accel.training.refused import prepare_multi_gpu_env as prepare_multi_gpu_env
from notebook_accel.training.refused import (
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
)
from notebook_accel.training.refused import (
    prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env,
)
from notebook_accel.training.refused import prepare_tpu as prepare_tpu
from notebook_accel.training.refused import setup_fp8_env as setup_fp8_env
from notebook_accel.training.spawned import PrepareForLaunch as PrepareForLaunch
from notebook_accel.training.spawned import env_var_path_add as env_var_path_add

from .constants import *
from .dataclasses import *
from .environment import *
from .imports import *
from .other import *
