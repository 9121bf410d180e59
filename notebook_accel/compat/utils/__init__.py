"""A counterpart of ``accelerate.utils`` and its submodules."""

from notebook_accel.compat import _accelerate
from notebook_accel.config import write_basic_config
from notebook_accel.training.collectives import (
    CannotPadNestedTensorWarning,
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
)
from notebook_accel.training.collectives.data_group import (
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from notebook_accel.training.collectives.nested import (
    convert_to_fp32,
    find_batch_size,
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    recursively_apply,
    send_to_device,
)
from notebook_accel.training.files import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    SCALER_NAME,
    WEIGHTS_NAME,
    load,
    save,
)
from notebook_accel.training.fsdp_functions import *
from notebook_accel.training.precision.float8 import *
from notebook_accel.training.preparing import extract_model_from_parallel
from notebook_accel.training.processes.device_memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
)
from notebook_accel.training.processes.device_memory import (
    is_out_of_memory as should_reduce_batch_size,
)
from notebook_accel.training.processes.devices import set_numa_affinity
from notebook_accel.training.processes.devices import set_numa_affinity as override_numa_affinity
from notebook_accel.training.processes.logs import get_logger
from notebook_accel.training.processes.random_numbers import (
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from notebook_accel.training.processes.topology import barrier as wait_for_everyone
from notebook_accel.training.settings.environment import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
)
from notebook_accel.training.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.settings.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FP8BackendType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
)
from notebook_accel.training.settings.parallelism import (
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from notebook_accel.training.state import (
    AcceleratorState,
    PartialState,
    get_active_deepspeed_plugin,
)
from notebook_accel.training.stepping.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from notebook_accel.training.strategies.compiling import (
    DynamoBackend,
    TorchDynamoPlugin,
    compile_regions,
    has_compiled_regions,
    is_compiled_module,
)
from notebook_accel.training.strategies.deepspeed import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    GatheredParameters,
)
from notebook_accel.training.strategies.deepspeed_plugin import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    HfDeepSpeedConfig,
)
from notebook_accel.training.tracking import LoggerType

from .tqdm import *

__getattr__ = _accelerate.door("utils")
_accelerate.open_below(
    __name__,
    "utils",
    [
        *("ao", "bnb", "constants", "dataclasses", "deepspeed", "environment", "fsdp_utils"),
        *("imports", "launch", "megatron_lm", "memory", "modeling", "offload", "operations"),
        *("other", "random", "torch_xla", "transformer_engine", "versions"),
    ],
)
