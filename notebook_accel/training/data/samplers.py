"""Samplers that choose each rank's samples, by their indices or out of a stream.

Every rank runs through the whole order of samples and takes its own part of each *round*: the
samples on which all ranks work at the same step. With 2 ranks, 8 samples and batches of 3::

    order    0 1 2 | 3 4 5     6 7 . | . . .
             rank 0  rank 1    rank 0  rank 1
             first round       last round: lacks 4 samples

A last round that lacks samples is filled up with samples from the start of the data (``6 7 0`` for
rank 0 and ``1 2 3`` for rank 1), is given out incomplete (``even_batches=False``), or is left out
(``drop_last``). Where it is filled up, the repeated samples come last in the order of the ranks,
and ``gather_for_metrics`` cuts their results off the end of what a rank computed;
:class:`ShortRound` tells it how many.

Ranks do not tell each other what they read: the division relies on all of them running through the
same order. Prepared loaders therefore give all ranks the same random state when a pass (run over
the loader) begins. Ranks that hold one model together (tensor parallelism, pipelines) read the same
samples; they count as one rank in ``num_processes`` and ``process_index`` here.

The batches of torch's own ``BatchSampler`` are nothing but its samples in groups, so a round is
filled up sample by sample. The batches of a user's own batch sampler may have a meaning (images of
one size, say, which alone can be stacked): their samples are never mixed, and a round is filled up
with whole batches.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from notebook_accel.errors import ConfigError
from notebook_accel.training.processes.random_numbers import new_generator
from notebook_accel.training.stepping.active_loaders import ShortRound


class RoundBatch(NamedTuple):
    """A batch together with facts about its round (the samples of all ranks at one step)."""

    batch: Any
    short_round: ShortRound | None
    """The sample counts of a round that lacks samples, or may; None for any other."""

    is_uneven: bool | None = None
    """Whether ranks may have batches of different sizes in this round; None leaves what is known of
    the pass."""


@dataclass
class ShardPass:
    """What a pass (one run over a :class:`BatchSamplerShard`) has found out about its last round.

    Each pass has its own object, because a second pass over the same sampler may begin before the
    first one ends, as ``next(iter(loader))`` does within a loop over the loader.

    Attributes:
        last_round: sample counts of an incomplete last round, set when the pass reaches it. None
            before that, and if the last round is full.
    """

    last_round: ShortRound | None = None


def fill_up(round_: list[Any], first_round: list[Any], size: int) -> list[Any]:
    """Return ``round_`` filled up to ``size`` items with those of ``first_round``."""
    return round_ + list(itertools.islice(itertools.cycle(first_round), size - len(round_)))


def own_parts(
    samples: Iterator[Any], size: int, own: slice, *, fills: bool, drops: bool
) -> Iterator[tuple[list[Any], ShortRound | None]]:
    """Yield a rank's part of each round of ``size`` samples, and the counts of a short last one.

    While a rank has its part, no sample of the next round is read.

    Args:
        fills: fill up a short last round with samples of the first one that is read.
        drops: leave it out.
    """
    round_ = [*itertools.islice(samples, size)]
    # Kept only where it may be needed: a sample can be large.
    first_round = round_ if fills and not drops else []
    while len(round_) == size:
        yield round_[own], None
        round_ = [*itertools.islice(samples, size)]
    if round_ and not drops:
        part = (fill_up(round_, first_round, size) if fills else round_)[own]
        yield part, ShortRound(len(round_), len(part), len(round_[own]))


def share_of(batch_size: int, num_processes: int, split_batches: bool) -> int:
    """Return the number of samples that each rank gets per step."""
    if not split_batches:
        return batch_size
    if batch_size % num_processes:
        raise ConfigError(
            f"split_batches=True divides each batch of {batch_size} over {num_processes} "
            f"processes: expected a batch size that is a multiple of {num_processes}; change "
            "it, or leave split_batches out"
        )
    return batch_size // num_processes


class BatchSamplerShard(BatchSampler):
    """A batch sampler that yields the batches of one rank, out of those of another batch sampler.

    Args:
        batch_sampler: gives lists of indices, in the same order on every rank.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: True: divide each batch over the ranks. False: give whole batches to the
            ranks in turn.
        even_batches: fill up the last round (the samples of all ranks at one step) from the start
            of the order.

    Raises:
        ConfigError: ``split_batches`` is set with a batch size that is not a multiple of
            ``num_processes``, or with a batch sampler of the user's own.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.newest_pass = ShardPass()
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        if split_batches and num_processes > 1 and not self._shares_samples:
            raise ConfigError(
                f"split_batches=True divides batches over {num_processes} processes, and "
                f"{type(batch_sampler).__name__} makes batches of its own, which stay whole: leave "
                "split_batches out, or let rank 0 divide them (dispatch_batches=True)"
            )
        _ = self._share  # refuses a batch size that cannot be divided

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler that every rank runs through; a script may set another one."""
        return self._batch_sampler

    @batch_sampler.setter
    def batch_sampler(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:
        """The sampler of :attr:`batch_sampler`, whose indices are divided among the ranks."""
        return getattr(self.batch_sampler, "sampler", self.batch_sampler)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        if hasattr(self.batch_sampler, "sampler"):
            self.batch_sampler.sampler = sampler

    @property
    def _share(self) -> int:
        """Samples of a rank in a round; 0 for a user's own batch sampler."""
        # Computed at each use: a script may set num_processes and process_index afterwards.
        return share_of(self.batch_size or 0, self.num_processes, self.split_batches)

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may get batches of different sizes at the same step."""
        is_filled = self.even_batches or self.drop_last
        return self.num_processes > 1 and not (is_filled and self._shares_samples)

    @property
    def total_length(self) -> int:
        """Number of batches that :attr:`batch_sampler` gives all ranks together in an epoch."""
        return len(self.batch_sampler)

    @property
    def _shares_samples(self) -> bool:
        """Whether samples are divided; a user's own batches stay whole."""
        return not has_own_batches(self.batch_sampler)

    @property
    def num_samples(self) -> int | None:
        """Number of samples that all ranks get in an epoch, each counted once; None if unknown."""
        length = length_or_none(self.sampler) if self._shares_samples else None
        return None if length is None else max(0, length - self._num_skipped)

    @property
    def _num_skipped(self) -> int:
        """Number of samples at the start of the order that ``skip_first_batches`` leaves out."""
        number, inner = 0, self.batch_sampler
        while isinstance(inner, SkipBatchSampler):
            number, inner = number + inner.skip_batches, inner.batch_sampler
        return number * int(self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers inside the number of the next epoch, if they have ``set_epoch``."""
        parts: tuple[Any, ...] = (self.batch_sampler, self.sampler)
        for inner in parts:
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)

    def __len__(self) -> int:
        if self.num_processes == 1:
            return len(self.batch_sampler)
        if self._shares_samples:
            num_samples = max(0, len(self.sampler) - self._num_skipped)
            whole, rest = divmod(num_samples, self._share * self.num_processes)
            # Where the last round is given out as it is, this rank gets something of it only if
            # there is more than the ranks before it take.
            needed = self._share * self.process_index
        else:
            whole, rest = divmod(len(self.batch_sampler), self.num_processes)
            needed = self.process_index
        return whole + (not self.drop_last and rest > (0 if self.even_batches else needed))

    def __iter__(self) -> Iterator[Any]:
        self.newest_pass = found = ShardPass()
        if self.num_processes == 1:
            return iter(self.batch_sampler)
        return self._share_samples(found) if self._shares_samples else self._share_batches(found)

    def _share_samples(self, found: ShardPass) -> Iterator[list[Any]]:
        share = self._share
        size = share * self.num_processes
        own = slice(share * self.process_index, share * (self.process_index + 1))
        # The samples come from the sampler itself: what its batch sampler skips is skipped here.
        samples = itertools.islice(self.sampler, self._num_skipped, None)
        drops = self.drop_last
        for batch, short in own_parts(samples, size, own, fills=self.even_batches, drops=drops):
            # Before the yield: the loader asks for it while the loop has the batch.
            found.last_round = short
            if batch:
                yield batch

    def _share_batches(self, found: ShardPass) -> Iterator[Any]:
        """Give the batches of a user's own batch sampler to the ranks in turn, each whole."""
        batches, size = iter(self.batch_sampler), self.num_processes
        first_round = round_ = [*itertools.islice(batches, size)]
        # One round ahead: only the last one may need filling up.
        while following := [*itertools.islice(batches, size)]:
            yield round_[self.process_index]
            round_ = following
        num_batches = len(round_)
        if not num_batches or (num_batches < size and self.drop_last):
            return
        filled = fill_up(round_, first_round, size) if self.even_batches else round_
        if self.process_index < len(filled):
            batch = filled[self.process_index]
            batch_size = len(batch) if isinstance(batch, Sized) else None
            # A batch without a size (a single index, say) counts as one sample.
            own = 0 if self.process_index >= num_batches else batch_size or 1
            # Batches may differ in size, so that no rank knows how many samples all have.
            found.last_round = ShortRound(-1, batch_size, own)
            yield batch


def has_own_batches(batch_sampler: Any) -> bool:
    """Return whether a batch sampler makes batches in another way than torch's ``BatchSampler``."""
    while isinstance(batch_sampler, SkipBatchSampler):
        batch_sampler = batch_sampler.batch_sampler
    return type(batch_sampler).__iter__ is not BatchSampler.__iter__


def length_or_none(sized: Any) -> int | None:
    """Return ``len(sized)``; None if it has none, or raises as torch's streams do."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def batch_sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that groups a loader's indices into batches; None without one."""
    own: Any = loader.sampler
    return own if isinstance(own, BatchSampler) else loader.batch_sampler


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Return the batch size of a loader or of its batch sampler; None if it has none."""
    return loader.batch_size or getattr(batch_sampler_of(loader), "batch_size", None)


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler inside a loader's batch sampler; None if it has none.

    That sampler gives single indices.

    Args:
        dataloader: the loader, prepared or not.
    """
    return getattr(batch_sampler_of(dataloader), "sampler", None)


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return all samplers of a loader, each once: outer ones first, then those inside of them."""
    found: list[Any] = []
    waiting = [loader.batch_sampler, loader.sampler]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and not any(sampler is other for other in found):
            found.append(sampler)
            waiting += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
    return found


class SkipBatchSampler(BatchSampler):
    """A batch sampler that leaves out the first batches of another one, in each epoch.

    Args:
        batch_sampler: the other batch sampler, which gives lists of indices.
        skip_batches: number of batches to leave out.
    """

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler: Any = batch_sampler
        self.skip_batches = skip_batches
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.sampler = getattr(batch_sampler, "sampler", batch_sampler)

    def __getattr__(self, name: str) -> Any:
        # While it is copied or unpickled it has no `batch_sampler` yet, and to look for it there
        # would come back here without end.
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SeedableRandomSampler(RandomSampler):
    """A random order that depends on a seed and the number of the epoch alone.

    Args:
        *args: those of torch's ``RandomSampler``.
        data_seed: the seed; None takes the seed of torch's global random numbers.
        **kwargs: those of torch's ``RandomSampler``.
    """

    counts_epochs = True
    """Whether each order that was read to its end is followed by that of the next epoch. Prepared
    loaders say themselves which epoch comes: they read indices ahead of their loop."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0
        # Whether all ranks have this seed: prepared loaders send rank 0's once.
        self.is_agreed = data_seed is not None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is given next."""
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


class IndexSource:
    """Wraps the sampler of a prepared loader and yields its indices from batch ``start`` on.

    The prepared loader sets the attributes before each pass. The sampler is asked for the indices
    of earlier batches too, but these batches are not loaded. Worker processes are seeded anew for
    each batch, by the seed of the pass and the number of the batch, so that a resumed pass augments
    its samples as the interrupted one would have. A user's ``worker_init_fn`` may seed them in its
    own way, so then nothing is seeded here.

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
        return (_Seeding(indices, seed, number) for number, indices in numbered)

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

    def __init__(self, indices: Any, seed_of_pass: int, number: int) -> None:
        self.indices = indices
        text = b"%d,%d" % (seed_of_pass, number)
        self.seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.indices, self.seed)


def _receive(indices: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return indices


class _ShortRoundSample(NamedTuple):
    """A sample of an incomplete last round, with the sample counts of that round."""

    sample: Any
    short_round: ShortRound


class ShortRoundCollate:
    """Wraps a ``collate_fn``: samples of an incomplete round become a :class:`RoundBatch`."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        first = samples[0] if isinstance(samples, list) and samples else samples
        if type(first) is not _ShortRoundSample:
            return self.collate(samples)
        plain = samples.sample if samples is first else [each.sample for each in samples]
        return RoundBatch(self.collate(plain), first.short_round)


@dataclass(eq=False, repr=False)
class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one rank, from an iterable dataset that every rank reads completely.

    The stream is divided into rounds: a round is the samples on which all ranks work at the same
    step. Each rank takes its own part of each round and drops the rest. A stream has no indices, so
    the dropped samples have to be read, too.

    If the last round is incomplete, the loader needs its sample counts (``ShortRound``): the number
    of its samples, of those in this rank's batch, and of those there that are not repeated. The
    stream may run in a worker process, which sends nothing but samples. So the counts travel with
    the samples::

        IterableDatasetShard: sample -> (sample, ShortRound)
          -> ShortRoundCollate: samples -> RoundBatch(batch, ShortRound)
          -> the loader, which takes the batch out

    Args:
        dataset: the stream, which gives the same samples in the same order on every rank.
        batch_size: batch size of the loader; None if each item of the dataset is a whole batch.
        drop_last: leave out the last round if it lacks samples.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: True: divide each batch over the ranks. False: give whole batches to the
            ranks in turn.
        even_batches: fill up the last round with samples from the start of the stream.
        marks_last_round: yield each sample of a last round that lacks samples together with the
            sample counts of that round; :class:`ShortRoundCollate` separates them again.

    Raises:
        ConfigError: ``split_batches`` is set, and ``batch_size`` is None or not a multiple of
            ``num_processes``.
    """

    dataset: Any
    batch_size: int | None = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True
    marks_last_round: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        batch_size, num_processes = self.batch_size, self.num_processes
        # While a rank has a batch, the dataset has given all samples of its round and none of the
        # next: so its own state says how far this is. (Attributes, since torchdata asks for them.)
        for name in ("state_dict", "load_state_dict"):
            if hasattr(self.dataset, name):
                setattr(self, name, getattr(self.dataset, name))
        if self.split_batches and batch_size is None:
            raise ConfigError(
                f"split_batches=True divides batches over {num_processes} processes, but this "
                "loader has batch_size=None, so that its dataset makes the batches: give it a "
                "batch size, let rank 0 read and divide them (dispatch_batches=True), or leave "
                "split_batches out"
            )
        # Without a batch size each sample is a batch that the dataset has made.
        share = share_of(batch_size or 1, num_processes, self.split_batches)
        self._samples_a_round = share * num_processes
        self._own_part = slice(share * self.process_index, share * (self.process_index + 1))

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may get batches of different sizes at the same step."""
        is_filled = self.even_batches or self.drop_last
        return self.num_processes > 1 and not (is_filled and self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset the number of the next epoch, if it has a method ``set_epoch``."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self._samples_a_round)
        share = self._samples_a_round // self.num_processes
        if self.drop_last or not rest:
            return whole * share
        if self.even_batches:
            return (whole + 1) * share
        return whole * share + len(range(rest)[self._own_part])

    def __iter__(self) -> Iterator[Any]:
        size, own, fills = self._samples_a_round, self._own_part, self.even_batches
        parts = own_parts(iter(self.dataset), size, own, fills=fills, drops=self.drop_last)
        for part, short in parts:
            if short is None or not self.marks_last_round:
                yield from part
                continue
            # Of batches that the dataset has made, the size is unknown.
            is_known = self.batch_size is not None
            marked = short if is_known else ShortRound(-1, None, short.num_own_samples)
            yield from (_ShortRoundSample(sample, marked) for sample in part)
