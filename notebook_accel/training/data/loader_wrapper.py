"""Loaders that keep another loader inside or leave batches out, and copies of a loader.

The loader inside is either of the user's own class, whose overrides stay in effect, or torchdata's
``StatefulDataLoader``. torchdata's is for datasets that have ``state_dict`` and
``load_state_dict`` (a stream over many files, say). To resume a stream in the middle of an epoch,
a prepared loader usually reads the earlier samples again and drops them. torchdata instead collects
the dataset's state, from worker processes too, and continues from it.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.config.checks import as_count
from notebook_accel.errors import ConfigError
from notebook_accel.private import of_libraries
from notebook_accel.training.data.samplers import SkipBatchSampler


class LoaderWrapper(DataLoader[Any]):
    """A DataLoader that reads from another DataLoader inside, ``base_dataloader``.

    Attributes that the wrapper lacks are looked up in the loader inside. This is the base class of
    prepared loaders and of ``SkipDataLoader``.
    """

    base_dataloader: DataLoader[Any]

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # while this is unpickled
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __getstate__(self) -> dict[str, Any]:
        # An iterator holds worker processes.
        return {**vars(self), "base_dataloader": copied(self.base_dataloader)}

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether the loader inside is torchdata's ``StatefulDataLoader``.

        Only the names of its classes are compared, so that torchdata need not be imported.
        """
        kinds = type(self.base_dataloader).__mro__
        return any(kind.__name__ == "StatefulDataLoader" for kind in kinds)

    def skipping(self, num_batches: int) -> LoaderWrapper:
        """Return a loader of the same data that begins each epoch at batch ``num_batches``."""
        return SkipDataLoader.around(self.base_dataloader, num_batches)

    def __len__(self) -> int:
        return len(self.base_dataloader)


def new_loader(dataset: Any, use_stateful: bool, arguments: dict[str, Any]) -> DataLoader[Any]:
    """Make a new loader: torchdata's ``StatefulDataLoader`` or torch's ``DataLoader``."""
    kind = _class_of_torchdata() if use_stateful else DataLoader
    return kind(dataset, **arguments)


def as_stateful(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a ``StatefulDataLoader`` of torchdata with the settings of ``loader``."""
    new = copied(loader, _class_of_torchdata())
    # What its __init__ sets in addition to what DataLoader's does.
    vars(new).update(
        snapshot_every_n_steps=1, next_iter_state=None, _initial_iter_for_state_dict=False
    )
    return new


def copied(loader: DataLoader[Any], kind: type[DataLoader[Any]] | None = None) -> DataLoader[Any]:
    """Return a shallow copy of ``loader``, which starts worker processes of its own."""
    kind = kind or type(loader)
    new: DataLoader[Any] = kind.__new__(kind)
    vars(new).update(vars(loader), _iterator=None)
    return new


def _class_of_torchdata() -> type[DataLoader[Any]]:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ConfigError(
            "use_stateful_dataloader=True needs torchdata's StatefulDataLoader, which could not be "
            f"imported ({error}): pip install torchdata, or leave it out"
        ) from error
    kind: type[DataLoader[Any]] = StatefulDataLoader
    return kind


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
        num_read = of_libraries.num_read(reader)
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
    num_batches = as_count("skip_first_batches: num_batches", num_batches, least=0)
    if isinstance(dataloader, LoaderWrapper):
        return dataloader.skipping(num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader.around(dataloader, num_batches)
    new = copied(dataloader)
    name = "sampler" if new.batch_sampler is None else "batch_sampler"
    inner: Any = getattr(new, name)
    if isinstance(inner, SkipBatchSampler):
        inner = inner.batch_sampler
    vars(new)[name] = SkipBatchSampler(inner, num_batches)
    return new
