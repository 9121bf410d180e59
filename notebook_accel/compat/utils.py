"""Door: ``accelerate.utils`` under our name."""

from notebook_accel.training.collectives import (
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    gather,
    gather_object,
    honor_type,
    is_namedtuple,
    listify,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
    slice_tensors,
)
from notebook_accel.training.data.config import (
    DataLoaderConfiguration,
)
from notebook_accel.training.environment import (
    patch_environment,
)
from notebook_accel.training.fsdp_plugin import (
    FullyShardedDataParallelPlugin,
)
from notebook_accel.training.memory import (
    find_executable_batch_size,
    release_memory,
)
from notebook_accel.training.parallelism import (
    ParallelismConfig,
)
from notebook_accel.training.prepare import (
    extract_model_from_parallel,
)
from notebook_accel.training.progress import (
    tqdm,
)
from notebook_accel.training.saving import (
    save,
)
from notebook_accel.training.seeding import (
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from notebook_accel.training.settings import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from notebook_accel.training.topology import (
    barrier as wait_for_everyone,
)

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ParallelismConfig",
    "ProfileKwargs",
    "ProjectConfiguration",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_device",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "honor_type",
    "is_namedtuple",
    "listify",
    "pad_across_processes",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]
