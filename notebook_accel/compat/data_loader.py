"""Door: ``accelerate.data_loader`` under our name, with what it has imported there."""

from notebook_accel.training.data import skip_first_batches as skip_first_batches
from notebook_accel.training.data.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from notebook_accel.training.data.loaders import PreparedLoader as DataLoaderStateMixin
from notebook_accel.training.data.samplers import BatchSamplerShard as BatchSamplerShard
from notebook_accel.training.data.samplers import SkipBatchSampler as SkipBatchSampler
from notebook_accel.training.data.samplers import get_sampler as get_sampler
from notebook_accel.training.data.seedable import SeedableRandomSampler as SeedableRandomSampler
from notebook_accel.training.data.shard import DataLoaderShard as DataLoaderShard
from notebook_accel.training.data.skip_loader import SkipDataLoader as SkipDataLoader
from notebook_accel.training.data.standalone import prepare_data_loader as prepare_data_loader
from notebook_accel.training.data.streams import IterableDatasetShard as IterableDatasetShard

from .logging import *
from .state import *
from .utils import *
