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
from .launch import *
from .megatron_lm import AbstractTrainStep as AbstractTrainStep
from .megatron_lm import BertTrainStep as BertTrainStep
from .megatron_lm import GPTTrainStep as GPTTrainStep
from .megatron_lm import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from .megatron_lm import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from .megatron_lm import T5TrainStep as T5TrainStep
from .megatron_lm import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from .memory import *
from .modeling import *
from .offload import *
from .operations import *
from .other import *
from .random import *
from .torch_xla import *
from .tqdm import tqdm as tqdm
from .transformer_engine import *
from .versions import *
