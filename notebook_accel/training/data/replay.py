"""What a dataset draws from random numbers, so that a pass that is resumed gets the very same.

This holds for datasets that are read by index. Not replayed:

- what a stream draws while its first batches are read and left out;
- what workers draw where the user has a ``worker_init_fn``, which may seed them;
- what torchdata's loader reads of a dataset with ``state_dict``;
- what later reads in the rank's own process draw, once the first 4 reads of a pass drew nothing
  (or the first read alone, if the pass before drew nothing).

A prepared loader reads one batch ahead of its loop. Where samples are read in the rank's own
process, what they draw from the global random numbers (an augmentation, say) lies between what two
steps of the training draw (dropout)::

    read 0   read 1   step 0   read 2   step 1   | saved while the loop has batch 1
             ^                 ^                    batch 2 is read already: `ahead` keeps the
                                                    states before that read

    resumed  [states of the save]   back to `ahead`: read 2   forth again   read 3   step 2   ...

``begin`` are the states before the first read, from which a sampler without a generator of its own
draws the order of the whole pass; that is at the first ``next``. ``opened`` are those at
``iter(loader)``, when torch's iterator is made: some samplers draw their order there. What the
user's code draws between the two is not replayed.

Worker processes have random numbers of their own. They are seeded anew for each batch, by the seed
of the pass and the number of the batch, so that they do not depend on which batches came before.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from notebook_accel.training.data.samplers import length_of
from notebook_accel.training.random_states import (
    as_plain,
    note_random_states,
    random_states_unchanged_since,
    set_random_states,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["IndexSource", "Replay", "seed_of_pass"]

_HOST = torch.device("cpu")
_NO_BATCH = object()
# Keeping the states costs more than reading a tensor, so that it is only done where it matters:
# after so many reads that drew nothing, the rest of the pass is trusted to draw nothing.
_READS_TO_WATCH = 4


class IndexSource:
    """What torch's iterators take indices from: the loader's sampler, from batch ``start`` on.

    So an epoch that is resumed runs through the indices of what it skips, and loads none of it (of
    a stream, which has no indices, it loads all).

    Attributes:
        start: the batch to begin with.
        keeps_first: give the first batch of the epoch too, ahead of the others.
        before_start: called right before batch ``start`` is asked for, unless that is the first.
        seed: seeds the random numbers of worker processes, batch by batch; None leaves them.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.start = 0
        self.keeps_first = False
        self.before_start: Callable[[], None] | None = None
        self.seed: int | None = None

    def __iter__(self) -> Iterator[Any]:
        # Torch may call this twice for a pass and use one: nothing is read before a first next().
        if not self.start and self.seed is None:
            return iter(self.sampler)
        # Kept in locals: another pass may change both before this one takes its first index.
        batches = self.skip(enumerate(self.sampler), self.start)
        seed = self.seed
        if seed is None:
            return (indices for _, indices in batches)
        return (_Seeding(indices, _digest(b"", seed, number)) for number, indices in batches)

    def __len__(self) -> int:
        return length_of(self.sampler)

    def skip(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        """The items of ``batches`` from ``number`` on; earlier ones are read and dropped.

        Args:
            batches: from the start of the epoch.
            number: how many are left out, but for the first with ``keeps_first``.
        """
        return _skip(batches, number, self.keeps_first, self.before_start)


def _skip(
    batches: Iterator[Any],
    number: int,
    keeps_first: bool,
    before_start: Callable[[], None] | None,
) -> Iterator[Any]:
    for position, batch in enumerate(itertools.islice(batches, number)):
        if keeps_first and not position:
            yield batch
    if before_start is not None:
        before_start()
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


def seed_of_pass(generator: torch.Generator, *numbers: int) -> int:
    """A seed for the workers of one pass, from the state of a generator that draws nothing for it,
    and from numbers that tell this pass from others."""
    return _digest(generator.get_state().numpy().tobytes(), *numbers)


def _digest(text: bytes, *numbers: int) -> int:
    digest = hashlib.blake2b(text, digest_size=8)
    digest.update(b",".join(b"%d" % number for number in numbers))
    return int.from_bytes(digest.digest(), "little")


class Replay:
    """The global random numbers of one pass, as its reads find them.

    Args:
        restored: what :meth:`state_dict` gave in the pass that this one goes on with.
        watches: whether samples are read in this process.
        before: the replay of the loader's pass before this one.

    Attributes:
        ahead: for each batch that is read and not yet given, the states before its read; empty
            where reads draw nothing. Whoever gives a batch to the loop removes the first.
        draws_nothing: whether reads were watched, and none drew from the random numbers.
        is_resumed: whether the pass goes on with another one.
    """

    def __init__(
        self,
        restored: Mapping[str, Any] | None,
        *,
        watches: bool,
        before: Replay | None = None,
    ) -> None:
        self._restored = restored
        self.is_resumed = restored is not None
        self._opened = None if restored is None else restored["opened"]
        self._begin = None if restored is None else restored["begin"]
        self.ahead: list[Any] = [] if restored is None else list(restored["ahead"])
        self._num_watched = 0
        if watches:
            # One read tells whether what was found in the pass before still holds.
            self._num_watched = 1 if before and before.draws_nothing else _READS_TO_WATCH
        self.draws_nothing: bool = False
        self._draws = bool(self.ahead)

    def open(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of the iterator that ``make`` gives, each read with the random numbers that
        belong to it."""
        now = note_random_states()
        if self._opened is None:
            self._opened = now
            return self._read_all(make())
        set_random_states(self._opened, _HOST)
        try:
            return self._read_all(make())
        finally:
            set_random_states(now, _HOST)

    def _read_all(self, source: Iterator[Any]) -> Iterator[Any]:
        # Once the reads need no care, they come from torch's iterator itself: a generator between
        # the two would take its time for each batch.
        return itertools.chain(self._read_with_care(source), source)

    def _read_with_care(self, source: Iterator[Any]) -> Iterator[Any]:
        """The first batches of a pass; all of them, where reads draw.

        A pass that is resumed sets the random states before the reads that were made already when
        it was saved. From then on, and from the start of a new pass, the states before each read
        are kept, and compared with those after it, to learn whether reads draw at all.
        """
        now = note_random_states()
        before: Mapping[str, Any] | None = None
        if self._begin is None:
            self._begin = before = now
        else:
            yield from self._read_again(source, self._begin, now)
        while self._draws or self._num_watched:
            before = before or note_random_states()
            self.ahead.append(before)
            batch = next(source, _NO_BATCH)
            if batch is _NO_BATCH:
                return
            if not self._draws:
                self._watch(before)
            yield batch
            before = None  # the loop may draw before it asks for the next batch

    def _read_again(
        self, source: Iterator[Any], begin: Mapping[str, Any], now: Mapping[str, Any]
    ) -> Iterator[Any]:
        """The first batch of a resumed pass, and what else was read ahead as it was saved.

        From ``begin`` the order of the pass is drawn. Then, before it reads the first batch, the
        source calls ``reach_start``, which sets the states of that read.
        """
        later = self.ahead[1:]
        if self._num_watched and not self.ahead:
            # Nobody kept the states before this read. They are kept from now on (`reach_start` puts
            # them here), so that `ahead` has an entry for each batch read and not yet given.
            self.ahead.append(begin)
        for before in [begin, *later]:
            set_random_states(before, _HOST)
            batch = next(source, _NO_BATCH)
            set_random_states(now, _HOST)
            if batch is _NO_BATCH:
                return
            yield batch

    def _watch(self, before: Mapping[str, Any]) -> None:
        self._num_watched -= 1
        self._draws = not random_states_unchanged_since(before)
        if not self._draws and not self._num_watched:
            self.ahead.clear()
            self.draws_nothing = True

    def reach_start(self) -> None:
        """Put back the states of the original read of a resumed pass's first batch if they are
        known, and note the present ones if not. The source calls this right before that read."""
        known = [] if self._restored is None else self._restored["ahead"]
        if known:
            set_random_states(known[0], _HOST)
        elif self.ahead:
            self.ahead[-1] = note_random_states()

    def state_dict(self) -> dict[str, Any]:
        """The states from which this pass goes on, after the batch that the loop has."""
        return {
            "opened": self._opened and as_plain(self._opened),
            "begin": self._begin and as_plain(self._begin),
            "ahead": [*map(as_plain, self.ahead)],
        }
