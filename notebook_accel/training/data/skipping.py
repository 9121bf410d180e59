"""Loaders without the first batches of each epoch."""

from __future__ import annotations

import itertools
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.training.data.loaders import PreparedLoader
from notebook_accel.training.data.samplers import SkipBatchSampler
from notebook_accel.training.data.wrapping import LoaderAround, copied, new_loader
from notebook_accel.training.settings.handlers import as_steps

__all__ = ["SkipDataLoader", "skip_first_batches"]


class SkipDataLoader(LoaderAround):
    """A loader, not prepared, without the first batches of an iterable dataset.

    Args:
        dataset: as torch's DataLoader, like all other arguments.
        skip_batches: batches at the start of each epoch that are left out.
        use_stateful_dataloader: keep torchdata's ``StatefulDataLoader`` inside.
        **kwargs: further arguments of torch's DataLoader.

    Raises:
        ConfigError: torchdata's loader is asked for, and torchdata is not installed.
    """

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        self.base_dataloader = new_loader(dataset, use_stateful_dataloader, kwargs)
        self.skip_batches = skip_batches

    @classmethod
    def around(cls, loader: DataLoader[Any], skip_batches: int) -> SkipDataLoader:
        """``loader`` without its first batches."""
        new = cls.__new__(cls)
        new.base_dataloader, new.skip_batches = loader, skip_batches
        return new

    def __iter__(self) -> Any:
        reader = iter(self.base_dataloader)
        # One of torchdata's that goes on from a state has read some batches already.
        num_read = getattr(reader, "_num_yielded", 0)
        return itertools.islice(reader, max(0, self.skip_batches - num_read), None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader that begins each epoch at batch ``num_batches``, without loading those before (of a
    stream they are read, and dropped).

    Use it for the epoch that is resumed, and the loader itself for those after it. The number
    counts from the start of the epoch, also where the loader was restored in the middle.

    Args:
        dataloader: prepared or not.
        num_batches: batches to leave out, 0 or more: of this rank where the loader is prepared,
            else of the loader as it is, for all ranks together.

    Raises:
        ConfigError: ``num_batches`` is no such number.
    """
    num_batches = as_steps("skip_first_batches(num_batches=...)", num_batches, least=0)
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if isinstance(dataloader, SkipDataLoader):
        dataloader = dataloader.base_dataloader
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader.around(dataloader, num_batches)
    new = copied(dataloader)
    name = "sampler" if new.batch_sampler is None else "batch_sampler"
    inner: Any = getattr(new, name)
    if isinstance(inner, SkipBatchSampler):
        inner = inner.batch_sampler
    vars(new)[name] = SkipBatchSampler(inner, num_batches)
    return new
