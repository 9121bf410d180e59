"""Resume a pass over a loader with the indices and random numbers that it would have had.

A pass (one run over a loader) that is resumed at batch n takes the indices of earlier batches from
the sampler, but does not load these batches (:class:`IndexSource`). The random numbers that reading
draws (in an augmentation, say) are those that the interrupted pass would have drawn:

- Worker processes are seeded anew for each batch, by the seed of the pass and the number of the
  batch, unless the user has a ``worker_init_fn``, which may seed them.
- Reads in the rank's own process draw from the global random numbers, between the draws of the
  training steps (dropout). The loader reads one batch ahead of its loop. So a batch may be read
  before the states of a checkpoint are taken, and read again after they are restored. Therefore the
  states before the newest read are kept (``Position.before_read``)::

    read 0   read 1   step 0   read 2   step 1   | saved while the loop has batch 1
                               ^                    batch 2 is read already: `before_read` has the
                                                    states before that read

    resumed  set `before_read`   read 2   set the states of the save   read 3   step 2

Keeping the states costs more than reading a small tensor. After two reads in a row that drew no
random numbers, the states are not kept for the rest of the pass.

``Position.begin`` has the states at the start of the pass, from which a sampler without a
generator of its own draws its order.
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

_HOST = torch.device("cpu")
_NO_BATCH = object()
_QUIET_READS = 2


class IndexSource:
    """Wraps the sampler of a prepared loader and yields its indices from batch ``start`` on.

    The prepared loader sets the attributes before each pass.

    Attributes:
        sampler: the wrapped sampler (of batches or of single indices).
        start: number of the batch to begin with.
        keeps_first: yield the first batch of the epoch too, ahead of batch ``start``.
        at_start: called right before batch ``start`` is taken from the sampler; not called if
            ``start`` is 0.
        seed: base of the seeds that worker processes set before each batch; None leaves their
            random numbers alone.
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
    """Yield ``batches`` without the first ``number`` of them.

    Args:
        batches: the batches of an epoch, from its start.
        number: how many are left out.
        keeps_first: yield the very first batch all the same.
        at_start: called after the skipped batches were taken, right before the next batch is
            taken; not called if ``number`` is 0.
    """
    for position, batch in enumerate(itertools.islice(batches, number)):
        if keeps_first and not position:
            yield batch
    if number and at_start is not None:
        at_start()
    yield from batches


class _Seeding:
    """Indices of a batch that seed the random numbers of the worker process that receives them."""

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
    """Return the batches of a pass; in a resumed pass, restore the random numbers for reading.

    Args:
        make: returns the iterator over the batches. Its argument is a function to call before the
            first batch is read (``at_start`` of :class:`IndexSource`), or None.
        position: the state of the pass; the random states are kept in it.
        restored: the random states of the interrupted pass: "begin" from its start, "ahead" from
            before its newest read (``Position.before_read``). None for a pass that begins anew.
        reads_here: whether samples are read in this process, rather than in worker processes.
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
    """Yield the first batches of a pass, and store the random states before each read.

    The iterator ends after two reads in a row that drew no random numbers; the caller then takes
    the remaining batches from ``source`` itself.

    Args:
        source: the iterator over all batches.
        position: the state of the pass; the random states are kept in it.
        again: random states to set after the first read, if the pass is resumed; else None.
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
