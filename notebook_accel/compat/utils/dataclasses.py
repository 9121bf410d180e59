"""Door: ``accelerate.utils.dataclasses`` under our name, with what it has imported there."""

from notebook_accel.training.big_modeling.dtypes import CustomDtype as CustomDtype
from notebook_accel.training.big_modeling.quantized import (
    BnbQuantizationConfig as BnbQuantizationConfig,
)
from notebook_accel.training.compiling import DynamoBackend as DynamoBackend
from notebook_accel.training.compiling import TorchDynamoPlugin as TorchDynamoPlugin
from notebook_accel.training.data.config import DataLoaderConfiguration as DataLoaderConfiguration
from notebook_accel.training.deepspeed_plugin import DeepSpeedPlugin as DeepSpeedPlugin
from notebook_accel.training.float8 import AORecipeKwargs as AORecipeKwargs
from notebook_accel.training.fsdp_plugin import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from notebook_accel.training.model_parts import (
    get_module_class_from_name as get_module_class_from_name,
)
from notebook_accel.training.not_built import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
)
from notebook_accel.training.not_built import FP8RecipeKwargs as FP8RecipeKwargs
from notebook_accel.training.not_built import MegatronLMPlugin as MegatronLMPlugin
from notebook_accel.training.not_built import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from notebook_accel.training.not_built import TERecipeKwargs as TERecipeKwargs
from notebook_accel.training.parallelism import (
    TorchContextParallelConfig as TorchContextParallelConfig,
)
from notebook_accel.training.parallelism import (
    TorchTensorParallelConfig as TorchTensorParallelConfig,
)
from notebook_accel.training.parallelism import (
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from notebook_accel.training.refused import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from notebook_accel.training.settings import AutocastKwargs as AutocastKwargs
from notebook_accel.training.settings import ComputeEnvironment as ComputeEnvironment
from notebook_accel.training.settings import DDPCommunicationHookType as DDPCommunicationHookType
from notebook_accel.training.settings import (
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
)
from notebook_accel.training.settings import DistributedType as DistributedType
from notebook_accel.training.settings import FP8BackendType as FP8BackendType
from notebook_accel.training.settings import (
    GradientAccumulationPlugin as GradientAccumulationPlugin,
)
from notebook_accel.training.settings import GradScalerKwargs as GradScalerKwargs
from notebook_accel.training.settings import InitProcessGroupKwargs as InitProcessGroupKwargs
from notebook_accel.training.settings import KwargsHandler as KwargsHandler
from notebook_accel.training.settings import LoggerType as LoggerType
from notebook_accel.training.settings import PrecisionType as PrecisionType
from notebook_accel.training.settings import ProfileKwargs as ProfileKwargs
from notebook_accel.training.settings import ProjectConfiguration as ProjectConfiguration
from notebook_accel.training.settings import RNGType as RNGType
from notebook_accel.training.settings import SageMakerDistributedType as SageMakerDistributedType
from notebook_accel.training.tensor_layout import TensorInformation as TensorInformation

from .constants import *
from .environment import *
from .imports import *
from .versions import *
