"""What a pass reads, given again exactly where it is resumed: indices, and random numbers.

A pass that goes on at batch n takes the indices of the batches before it, and loads none of them
(:class:`IndexSource`). What its reads draw from the random numbers (an augmentation, say) is drawn
again:

- Worker processes are seeded anew for each batch, by the seed of the pass and the number of the
  batch, unless the user has a ``worker_init_fn``, which may seed them.
- Reads in the rank's own process draw from the global random numbers, between the draws of the
  steps (dropout). The loader reads one batch ahead of its loop, so that a batch may be read before
  the states of a checkpoint are taken, and read again after they are restored. So the states before
  the newest read are kept (``Position.before_read``)::

    read 0   read 1   step 0   read 2   step 1   | saved while the loop has batch 1
                               ^                    batch 2 is read already: `before_read` has the
                                                    states before that read

    resumed  [states of the save]   back to `before_read`: read 2   forth again   read 3   step 2

Keeping them costs more than reading a small tensor. So it ends for the rest of a pass with the
second read in a row that drew nothing.

``Position.begin`` has the states as the pass began, from which a sampler without a generator of its
own draws its order.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from notebook_accel.training.processes.random_states import (
    note_random_states,
    random_states_unchanged_since,
    set_random_states,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from notebook_accel.training.stepping.active_loaders import Position

__all__ = ["IndexSource", "replayed", "skip"]

_HOST = torch.device("cpu")
_NO_BATCH = object()
_QUIET_READS = 2


class IndexSource:
    """The sampler of a prepared loader, from batch ``start`` on.

    Attributes:
        sampler: that of the loader.
        start: the batch to begin with.
        keeps_first: give the first batch of the epoch too, ahead of the others.
        at_start: called right before batch ``start`` is asked for, unless that is the first.
        seed: seeds the random numbers of worker processes, batch by batch; None leaves them.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.start = 0
        self.keeps_first = False
        self.at_start: Callable[[], None] | None = None
        self.seed: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexSource, (self.sampler,)  # the rest is the pass's

    def __iter__(self) -> Iterator[Any]:
        # Torch may call this twice for a pass and use one: nothing is read before a first next().
        if not self.start and self.seed is None:
            return iter(self.sampler)
        # Kept in a local: another pass may change it before this one takes its first index.
        seed = self.seed
        numbered = skip(enumerate(self.sampler), self.start, self.keeps_first, self.at_start)
        if seed is None:
            return (indices for _, indices in numbered)
        return (_Seeding(indices, _digest(seed, number)) for number, indices in numbered)

    def __len__(self) -> int:
        return len(self.sampler)


def skip(
    batches: Iterator[Any],
    number: int,
    keeps_first: bool = False,
    at_start: Callable[[], None] | None = None,
) -> Iterator[Any]:
    """Leave out the first ``number`` batches, as :class:`IndexSource` does."""
    for position, batch in enumerate(itertools.islice(batches, number)):
        if keeps_first and not position:
            yield batch
    if number and at_start is not None:
        at_start()
    yield from batches


class _Seeding:
    """Indices that seed the random numbers of the worker process that receives them.

    The worker gets the plain indices: it reads them as they are unpickled, one batch at a time,
    right before it loads them.
    """

    def __init__(self, indices: Any, seed: int) -> None:
        self.indices = indices
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.indices, self.seed)


def _receive(indices: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return indices


def _digest(*numbers: int) -> int:
    text = b",".join(b"%d" % number for number in numbers)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def replayed(
    make: Callable[[Callable[[], None] | None], Iterator[Any]],
    position: Position,
    restored: Mapping[str, Any] | None,
    *,
    reads_here: bool,
) -> Iterator[Any]:
    """Yield the batches of a pass, read with the random numbers of the pass that is resumed.

    Args:
        make: begins to read; it is given what :class:`IndexSource` calls ``at_start``.
        position: of the pass, which keeps the states.
        restored: "begin" of the pass that this one goes on with, if it does, and as "ahead" its
            ``before_read``.
        reads_here: whether samples are read in this process.
    """
    now = position.begin = note_random_states()
    known: Mapping[str, Any] = {}
    if restored is not None:
        position.begin, known = restored["begin"], restored["ahead"]
        position.at_step = position.num_given, known
        set_random_states(position.begin, _HOST)

    def reach_start() -> None:
        if known:
            set_random_states(known, _HOST)
        position.before_read = note_random_states()

    source = make(reach_start if reads_here else None)
    if reads_here:
        # Once the states need not be kept, batches come from the source itself: a generator
        # between the two would take its time for each.
        again = None if restored is None else now
        return itertools.chain(_first_reads(source, position, again), source)
    if restored is not None:
        set_random_states(now, _HOST)
    return source


def _first_reads(
    source: Iterator[Any], position: Position, again: Mapping[str, Any] | None
) -> Iterator[Any]:
    """Yield batches before whose reads the random states are kept.

    Args:
        source: all batches.
        position: keeps the states.
        again: the states to set after the first read, where the pass is resumed.
    """
    num_quiet = 0
    while num_quiet < _QUIET_READS:
        before = position.before_read = note_random_states()
        batch = next(source, _NO_BATCH)
        if again is not None:
            set_random_states(again, _HOST)
        if batch is _NO_BATCH:
            return
        is_quiet = again is None and random_states_unchanged_since(before)
        num_quiet, again = num_quiet + 1 if is_quiet else 0, None
        yield batch
    position.before_read = {}
