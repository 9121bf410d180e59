"""An order of samples that a seed and the number of the epoch give, on every rank alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler

from notebook_accel.training.collectives import broadcast_object_list
from notebook_accel.training.seeding import new_generator

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SeedableRandomSampler"]


class SeedableRandomSampler(RandomSampler):
    """A random order that depends on a seed and the number of the epoch alone.

    Args:
        *args: those of torch's ``RandomSampler``.
        data_seed: the seed; None takes that of torch's global random numbers.
        **kwargs: those of torch's ``RandomSampler``.
    """

    counts_epochs = True
    """Whether each order that was read to its end is followed by that of the next epoch. Prepared
    loaders say themselves which epoch comes: they read indices ahead of their loop."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0
        self._is_agreed = data_seed is not None

    def agree_on_seed(self) -> None:
        """Take rank 0's seed, unless one was given: with different orders some samples would be
        read twice, and others never."""
        if not self._is_agreed:
            (self.initial_seed,) = broadcast_object_list([self.initial_seed])
            self._is_agreed = True

    def restore_seed(self, seed: int) -> None:
        """Take the seed of a checkpoint, which all ranks read."""
        self.initial_seed = seed
        self._is_agreed = True

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch's order comes next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # A generator made anew each time: an order that was begun and left is the same again.
        epoch = self.epoch
        seed = (self.initial_seed + epoch) % 2**64  # torch takes no larger one
        seeded = new_generator(seed)
        order = RandomSampler(
            self.data_source, self.replacement, self._num_samples, generator=seeded
        )
        yield from order
        if self.counts_epochs:
            self.epoch = epoch + 1
