"""Leave out the first batches of each epoch of a loader."""

from __future__ import annotations

import itertools
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.private import of_torchdata
from notebook_accel.training.data.loader_wrapper import LoaderWrapper, copied, new_loader
from notebook_accel.training.data.loaders import PreparedLoader
from notebook_accel.training.data.samplers import SkipBatchSampler
from notebook_accel.training.settings.handlers import as_steps


class SkipDataLoader(LoaderWrapper):
    """A DataLoader (not prepared) over a stream, without the first batches of each epoch.

    :func:`skip_first_batches` makes it. The skipped batches are read and dropped.

    Args:
        dataset: the stream (iterable dataset), as for torch's ``DataLoader``.
        skip_batches: number of batches that are left out at the start of each epoch.
        use_stateful_dataloader: keep torchdata's ``StatefulDataLoader`` inside, which saves and
            restores the state of a dataset that has ``state_dict``.
        **kwargs: further arguments of torch's DataLoader.

    Raises:
        ConfigError: ``use_stateful_dataloader`` is set, and torchdata is not installed.
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
        """Return a loader over ``loader`` without the first ``skip_batches`` of each epoch."""
        new = cls.__new__(cls)
        new.base_dataloader, new.skip_batches = loader, skip_batches
        return new

    def __iter__(self) -> Any:
        reader = iter(self.base_dataloader)
        # One of torchdata's that goes on from a state has read some batches already.
        num_read = of_torchdata.num_read(reader)
        return itertools.islice(reader, max(0, self.skip_batches - num_read), None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader that begins each epoch at batch ``num_batches``.

    Earlier batches are not loaded, except that those of a stream are read and dropped. Use the
    returned loader for the epoch that is resumed, and ``dataloader`` itself for later epochs.
    ``num_batches`` counts from the start of the epoch, even if the loader was restored in the
    middle.

    Args:
        dataloader: the loader, prepared or not.
        num_batches: number of batches to skip, 0 or more. For a prepared loader it counts batches
            of this rank, otherwise batches of the loader itself.

    Returns:
        The shorter loader.

    Raises:
        ConfigError: ``num_batches`` is not a whole number, or is negative.

    Example:
        >>> import torch
        >>> from notebook_accel import skip_first_batches
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(8))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=2)
        >>> len(skip_first_batches(loader, 3))
        1
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
