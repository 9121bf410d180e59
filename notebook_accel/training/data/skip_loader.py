"""A loader that is not prepared, without its first batches."""

from __future__ import annotations

import itertools
from typing import Any

from torch.utils.data import DataLoader

from notebook_accel.training.data.joined import WholeLoader, copy_as

__all__ = ["SkipDataLoader"]


class SkipDataLoader(DataLoader[Any], WholeLoader):
    """A loader, not prepared, without the first batches of an iterable dataset.

    Args:
        dataset: as torch's DataLoader, like all other arguments.
        skip_batches: batches at the start of each epoch that are left out.
        use_stateful_dataloader: make it torchdata's ``StatefulDataLoader`` too, whose arguments it
            then takes as well.
        **kwargs: further arguments of torch's DataLoader.

    Raises:
        ConfigError: torchdata's loader is asked for, and torchdata is not installed.

    Attributes:
        num_left_out: ``skip_batches`` as given. It has a name of its own because a prepared
            loader's ``skip_batches`` counts what ``skip_first_batches`` leaves out in addition.
    """

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            # Imported here: its module imports the prepared loaders.
            from notebook_accel.training.data.stateful import make_stateful

            make_stateful(self, SkipDataLoader)
        super().__init__(dataset, **kwargs)
        self.num_left_out = skip_batches

    @classmethod
    def around(cls, loader: DataLoader[Any], skip_batches: int) -> SkipDataLoader:
        """``loader`` without its first batches."""
        new = copy_as(cls, loader)
        new.num_left_out = skip_batches
        return new

    @property
    def skip_batches(self) -> int:
        """Batches at the start of each epoch that are left out."""
        return self.num_left_out

    def __iter__(self) -> Any:
        reader = super().__iter__()
        # One of torchdata's that goes on from a state has read some batches already. What a user's
        # own class gives may be a plain generator, which does not count.
        num_read = getattr(reader, "_num_yielded", 0)
        return itertools.islice(reader, max(0, self.num_left_out - num_read), None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.num_left_out)
