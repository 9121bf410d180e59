"""Door: ``accelerate.utils.megatron_lm`` under our name, with what it has imported there."""

from notebook_accel.training.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from notebook_accel.training.refused import AbstractTrainStep as AbstractTrainStep
from notebook_accel.training.refused import BertTrainStep as BertTrainStep
from notebook_accel.training.refused import GPTTrainStep as GPTTrainStep
from notebook_accel.training.refused import MegatronEngine as MegatronEngine
from notebook_accel.training.refused import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from notebook_accel.training.refused import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from notebook_accel.training.refused import (
    MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
)
from notebook_accel.training.refused import (
    MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
)
from notebook_accel.training.refused import T5TrainStep as T5TrainStep
from notebook_accel.training.refused import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from notebook_accel.training.refused import finish_mpu_init as finish_mpu_init
from notebook_accel.training.refused import (
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from notebook_accel.training.refused import initialize as initialize
from notebook_accel.training.refused import model_provider_func as model_provider_func
from notebook_accel.training.refused import prepare_data_loader as prepare_data_loader
from notebook_accel.training.refused import (
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
)
from notebook_accel.training.refused import prepare_optimizer as prepare_optimizer
from notebook_accel.training.refused import prepare_scheduler as prepare_scheduler
from notebook_accel.training.scheduler import AcceleratedScheduler as AcceleratedScheduler

from .imports import *
from .operations import *
