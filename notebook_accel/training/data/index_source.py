"""The indices of a pass (one run over a loader), from batch n on where an epoch is resumed.

The sampler is asked for the indices of earlier batches too, but these batches are not loaded.
Worker processes are seeded anew for each batch, by the seed of the pass and the number of the
batch, so that a resumed pass augments its samples as the interrupted one would have. A user's
``worker_init_fn`` may seed them in its own way, so then nothing is seeded here.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class IndexSource:
    """Wraps the sampler of a prepared loader and yields its indices from batch ``start`` on.

    The prepared loader sets the attributes before each pass.

    Attributes:
        sampler: the wrapped sampler (of batches or of single indices).
        start: number of the batch to begin with.
        keeps_first: yield the first batch of the epoch too, ahead of batch ``start``.
        seed: base of the seeds that worker processes set before each batch; None leaves their
            random numbers alone.
    """

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
    """Yield ``batches`` without the first ``number``; with ``keeps_first``, yield the very first.

    ``batches`` are those of an epoch, from its start.
    """
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
