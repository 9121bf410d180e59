"""Constants of Accelerate that code imports from it, and that nothing here needs."""

from __future__ import annotations

from notebook_accel.training.settings import DistributedType

__all__ = [
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "TORCH_LAUNCH_PARAMS",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
]

# From which torch on its profiler follows such devices.
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"

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
