"""Constants of Accelerate that code imports from it, and that nothing here needs."""

from __future__ import annotations

from notebook_accel.training.settings import DistributedType

__all__ = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "CUDA_DISTRIBUTED_TYPES",
    "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DTENSOR_PYTORCH_VERSION",
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
    "FSDP2_PYTORCH_VERSION",
    "FSDP2_STATE_DICT_TYPE",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_PYTORCH_VERSION",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "TORCH_DYNAMO_MODES",
    "TORCH_LAUNCH_PARAMS",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
]

# From which torch on its profiler follows such devices.
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"

# From which versions on Accelerate offers what they name; here that depends on them not at all.
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
FSDP2_PYTORCH_VERSION = "2.6.0"
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"

# What the options of FSDP, DeepSpeed and torch.compile may be: menus are made of these lists, and a
# number stands for a place in the first four.
FSDP_SHARDING_STRATEGY = [
    *("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
DEEPSPEED_MULTINODE_LAUNCHERS = [
    *("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
]
TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]

# Kinds of distributed training on NVIDIA's devices.
CUDA_DISTRIBUTED_TYPES = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]

# Kinds of distributed training whose ranks speak to each other by torch.distributed.
_SPEAK_OTHERWISE = (DistributedType.NO, DistributedType.XLA, DistributedType.MULTI_TPU)
TORCH_DISTRIBUTED_OPERATION_TYPES = [
    *(str(kind) for kind in DistributedType if kind not in _SPEAK_OTHERWISE),
    "TP",
]

# What torchrun takes on its command line.
TORCH_LAUNCH_PARAMS = [
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("standalone", "max_restarts", "monitor_interval", "start_method", "role", "module", "m"),
    *("no_python", "run_path", "log_dir", "r", "redirects", "t", "tee"),
    *("node_rank", "master_addr", "master_port"),
]
