"""Resume a pass over a loader with the indices and random numbers that it would have had.

A pass (one run over a loader) that is resumed at batch n takes the indices of earlier batches from
the sampler, but does not load these batches (:class:`IndexSource`). A sampler without a generator
of its own draws its order from the random states that the interrupted pass began with
(``Position.begin``). The training steps go on from the states of the checkpoint.

What samples draw when they are read (augmentations) is the same again in worker processes: they
are seeded for each batch by the seed of the pass and the number of the batch, unless the user has a
``worker_init_fn``. Reads in the rank's own process (``num_workers=0``) may draw other numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from notebook_accel.training.processes.random_states import note_random_states, set_random_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from notebook_accel.training.stepping.active_loaders import Position

_HOST = torch.device("cpu")


class IndexSource:
    """Wraps a prepared loader's sampler: yields indices from batch ``start`` on."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.start = 0
        self.keeps_first = False
        self.seed: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexSource, (self.sampler,)  # the rest is the pass's

    def __iter__(self) -> Iterator[Any]:
        # Torch may call this twice for a pass and use one: nothing is read before a first next().
        if not self.start and self.seed is None:
            return iter(self.sampler)
        # Kept in a local: another pass may change it before this one takes its first index.
        seed = self.seed
        numbered = skip(enumerate(self.sampler), self.start, self.keeps_first)
        if seed is None:
            return (indices for _, indices in numbered)
        return (_Seeding(indices, _digest(seed, number)) for number, indices in numbered)

    def __len__(self) -> int:
        return len(self.sampler)


def skip(batches: Iterator[Any], number: int, keeps_first: bool = False) -> Iterator[Any]:
    """Yield ``batches`` without the first ``number`` of them."""
    for position, batch in enumerate(itertools.islice(batches, number)):
        if keeps_first and not position:
            yield batch
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
    make: Callable[[], Iterator[Any]], position: Position, restored: Mapping[str, Any] | None
) -> Iterator[Any]:
    """Return the batches of a pass; a resumed pass draws its order as the interrupted one did.

    Args:
        restored: the random states of the interrupted pass: "begin" from its start. None for a pass
            that begins anew.
    """
    now = position.begin = note_random_states()
    if restored is None:
        return make()
    position.begin, position.at_step = restored["begin"], (position.num_given, True)
    set_random_states(position.begin, _HOST)
    source = make()
    first = list(itertools.islice(source, 1))  # the order is drawn as the first batch is read
    set_random_states(now, _HOST)
    return itertools.chain(first, source)
