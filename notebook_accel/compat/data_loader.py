"""Door: ``accelerate.data_loader`` under our name."""

from notebook_accel.training.data import (
    skip_first_batches,
)
from notebook_accel.training.data.dispatch import (
    DataLoaderDispatcher,
)
from notebook_accel.training.data.loaders import (
    DataLoaderShard,
    SkipDataLoader,
)
from notebook_accel.training.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from notebook_accel.training.data.standalone import (
    prepare_data_loader,
)

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]
