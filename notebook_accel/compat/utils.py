"""Door: ``accelerate.utils`` under our name."""

from notebook_accel.training.big_modeling.align_devices import (
    align_module_device,
    has_offloaded_params,
)
from notebook_accel.training.big_modeling.device_map import (
    check_device_map,
)
from notebook_accel.training.big_modeling.dtypes import (
    CustomDtype,
    dtype_byte_size,
)
from notebook_accel.training.big_modeling.inference import (
    infer_auto_device_map,
)
from notebook_accel.training.big_modeling.loading import (
    load_checkpoint_in_model,
    load_state_dict,
)
from notebook_accel.training.big_modeling.memory_limits import (
    get_balanced_memory,
    get_max_memory,
)
from notebook_accel.training.big_modeling.offload_store import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from notebook_accel.training.big_modeling.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_bytes,
    convert_file_size_to_int,
    get_max_layer_size,
)
from notebook_accel.training.big_modeling.tensors import (
    id_tensor_storage,
    named_module_tensors,
    set_module_tensor_to_device,
)
from notebook_accel.training.big_modeling.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
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
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "OffloadedWeightsLoader",
    "ParallelismConfig",
    "PrefixedDataset",
    "ProfileKwargs",
    "ProjectConfiguration",
    "align_module_device",
    "broadcast",
    "broadcast_object_list",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "compute_module_sizes",
    "concatenate",
    "convert_bytes",
    "convert_file_size_to_int",
    "convert_to_fp32",
    "dtype_byte_size",
    "extract_model_from_parallel",
    "extract_submodules_state_dict",
    "find_batch_size",
    "find_device",
    "find_executable_batch_size",
    "find_tied_parameters",
    "gather",
    "gather_object",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "has_offloaded_params",
    "honor_type",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_namedtuple",
    "listify",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_state_dict",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "pad_across_processes",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "retie_parameters",
    "save",
    "save_offload_index",
    "send_to_device",
    "set_module_tensor_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]
