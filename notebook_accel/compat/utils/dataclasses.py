"""Door: ``accelerate.utils.dataclasses`` under our name."""

from notebook_accel.training.data.config import (
    DataLoaderConfiguration,
)
from notebook_accel.training.fsdp_plugin import (
    FullyShardedDataParallelPlugin,
)
from notebook_accel.training.settings import (
    AutocastKwargs,
    ComputeEnvironment,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
)

__all__ = [
    "ComputeEnvironment",
    "PrecisionType",
    "RNGType",
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
    "LoggerType",
    "ProfileKwargs",
    "ProjectConfiguration",
]
