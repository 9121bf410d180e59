"""A counterpart of ``accelerate.data_loader``."""

from notebook_accel.compat import _accelerate
from notebook_accel.training.data import prepare_data_loader
from notebook_accel.training.data.dispatch import DataLoaderDispatcher
from notebook_accel.training.data.loader_wrapper import SkipDataLoader, skip_first_batches
from notebook_accel.training.data.loaders import DataLoaderShard
from notebook_accel.training.data.loaders import PreparedLoader as DataLoaderStateMixin
from notebook_accel.training.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
)

from .logging import *
from .state import *
from .utils import *

__getattr__ = _accelerate.door("data_loader")
