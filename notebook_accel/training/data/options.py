"""The settings of a prepared loader that torch's ``DataLoader`` does not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_accel.training.data_group import DataGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["LoaderOptions"]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What a prepared loader was told as it was made; it never changes."""

    device: torch.device | None = None
    """Where batches are put; None leaves them where they are."""

    non_blocking: bool = False
    """Whether the copies to the device run beside the loop's work."""

    rng_types: tuple[str, ...] = ()
    """Random states that every rank takes from rank 0 at the start of a pass."""

    synchronized_generator: torch.Generator | None = None
    """The generator that the order comes from, where there is one."""

    data_group: DataGroup = field(default_factory=partial(DataGroup.of_all_ranks, 1, 0))
    """Which ranks read different samples."""

    split_batches: bool = False
    """Whether each batch of the loader is divided over the ranks."""

    is_uneven: bool = False
    """Whether ranks may get batches of different sizes; what a sampler or dataset of ours says of
    itself (its ``is_uneven``) goes before this."""

    slice_fn: Callable[..., Any] | None = None
    """The user's way of taking one rank's part out of what rank 0 has read for all."""

    skip_batches: int | None = None
    """The batch to begin each epoch with; None is the first, or that of a restored state."""

    @property
    def num_processes(self) -> int:
        """Number of shares into which the data is divided."""
        return self.data_group.size

    @property
    def process_index(self) -> int:
        """Which of the shares this rank reads."""
        return self.data_group.index
