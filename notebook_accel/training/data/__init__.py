"""Prepared loaders: who gets which samples, and how an epoch goes on in its middle.

``distribute`` makes them. Who gets which samples is in ``samplers`` and ``iterable_datasets`` (each
rank reads its own) and ``rounds`` (rank 0 reads for all), what a prepared loader does in
``loaders`` and ``dispatch``, and how a resumed epoch reads up to its place in ``replay``. Which
loader is being iterated is in ``stepping/active_loaders``.

Three words are used throughout. A *round* is the samples on which all ranks work at the same step,
a *pass* is one run over a loader (``for batch in loader``), and a *share* is the part of the data
that one rank reads. Ranks that hold one model together read the same share (``DataGroup``).
"""

from notebook_accel.training.data.config import DataLoaderConfiguration
from notebook_accel.training.data.dispatch import DataLoaderDispatcher
from notebook_accel.training.data.distribute import prepare_data_loader, prepare_loader
from notebook_accel.training.data.loaders import DataLoaderShard, PreparedLoader
from notebook_accel.training.data.skipping import SkipDataLoader, skip_first_batches
from notebook_accel.training.stepping.active_loaders import ActiveLoaders, active_loaders

__all__ = [
    "ActiveLoaders",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "PreparedLoader",
    "SkipDataLoader",
    "active_loaders",
    "prepare_data_loader",
    "prepare_loader",
    "skip_first_batches",
]
