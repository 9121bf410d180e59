"""Which samples each rank gets.

Every rank runs through the whole order and takes its own part of each *round*, the batches that
the ranks work on at the same step. With 2 ranks, 8 samples and batches of 3::

    order    0 1 2 | 3 4 5     6 7 . | . . .
             rank 0  rank 1    rank 0  rank 1
             first round       last round: lacks 4 samples

The last round is filled up from the start of the data (``6 7 0`` and ``1 2 3``), is dealt out as
it is, or is dropped. What was repeated stands behind all that is real, in order of the ranks:
``gather_for_metrics`` cuts it off by that, from what :class:`LastRound` says.

No rank tells another what it reads, so this holds only while the order is the same everywhere:
loaders see to it as a pass begins. "Ranks" here are shares of the data: ranks that hold one model
together read the same share, and count as one in ``num_processes`` and ``process_index``.

The batches of torch's own ``BatchSampler`` are nothing but its samples in groups, so a round is
filled up sample by sample. The batches of a user's own batch sampler may have a meaning (images
of one size, say, which alone can be stacked): their samples are never mixed, and a round is
filled up with whole batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from notebook_accel.errors import ConfigError
from notebook_accel.training.collectives import broadcast_object_list

__all__ = [
    "BatchSamplerShard",
    "IterableDatasetShard",
    "LastRound",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "TailBatch",
    "TailCollate",
    "has_own_batches",
    "length_of",
    "share_of",
]


class LastRound(NamedTuple):
    """A round that lacked samples."""

    real: int
    """Samples of all ranks in it, those repeated to fill it up aside; -1 where no rank knows."""

    rows: int | None
    """Samples of this rank in it; None where the size of its batch is not known."""

    kept: int
    """Samples of this rank in it that are not repeated."""


class TailBatch(NamedTuple):
    """A batch of a last round, on its way from a worker of the loader."""

    batch: Any
    last_round: LastRound


# A sample of an iterable dataset's last round. The dataset may run in a worker process, so what
# it knows of the round can reach the loader with the samples alone.
class _TailSample(NamedTuple):
    sample: Any
    last_round: LastRound


class TailCollate:
    """A ``collate_fn`` that says of a batch that it is of the last round."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        first = samples[0] if isinstance(samples, list) and samples else samples
        if type(first) is not _TailSample:
            return self.collate(samples)
        plain = samples.sample if samples is first else [each.sample for each in samples]
        return TailBatch(self.collate(plain), first.last_round)


def _fill(samples: list[Any], first: list[Any], size: int) -> list[Any]:
    return samples + list(itertools.islice(itertools.cycle(first), size - len(samples)))


def share_of(batch_size: int, num_processes: int, split_batches: bool) -> int:
    """Samples that each rank gets a round, of loaders with this batch size."""
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
    """The batches of one rank, out of a batch sampler that all ranks run alike.

    Args:
        batch_sampler: gives lists of indices, in the same order on every rank.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: divide each batch over the ranks, rather than deal out whole ones.
        even_batches: fill the last round up with samples from the start.

    Raises:
        ConfigError: ``split_batches`` with a batch size that cannot be divided.
    """

    last_round: LastRound | None = None
    """The round that lacked samples, once the last pass has reached it."""

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.sampler = getattr(batch_sampler, "sampler", batch_sampler)
        if split_batches and self.batch_size is None:
            raise ConfigError(
                f"split_batches=True divides batches over {num_processes} processes, but "
                f"{type(batch_sampler).__name__} has no batch_size; give it one, or leave "
                "split_batches out"
            )
        share = share_of(self.batch_size or 0, num_processes, split_batches)
        # Samples a round, and which of them are this rank's. Without a batch size (a user's own
        # batch sampler) both are empty, and whole batches are dealt instead.
        self._samples_a_round = share * num_processes
        self._own_part = slice(share * process_index, share * (process_index + 1))

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may get batches of different sizes at the same step."""
        is_filled = self.even_batches or self.drop_last
        return self.num_processes > 1 and not (is_filled and self._deals_samples)

    @property
    def total_length(self) -> int:
        """Number of batches of the batch sampler that is shared out."""
        return length_of(self.batch_sampler)

    @property
    def remainder(self) -> int:
        """Samples that the last round will have; 0 for a whole one, -1 where it is not known."""
        if self.drop_last or not self._deals_samples or not isinstance(self.sampler, Sized):
            return -1
        return self._num_samples % self._samples_a_round

    @property
    def _deals_samples(self) -> bool:
        return not has_own_batches(self.batch_sampler)

    @property
    def _num_skipped(self) -> int:
        """Samples at the start of the order that a loader which skips batches leaves out."""
        num_batches, inner = 0, self.batch_sampler
        while isinstance(inner, SkipBatchSampler):
            num_batches += inner.skip_batches
            inner = inner.batch_sampler
        return num_batches * int(self.batch_size)

    @property
    def _num_samples(self) -> int:
        return max(0, length_of(self.sampler) - self._num_skipped)

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers inside which epoch comes."""
        parts: tuple[Any, ...] = (self.batch_sampler, self.sampler)
        for inner in parts:
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)

    def __len__(self) -> int:
        if self.num_processes == 1:
            return length_of(self.batch_sampler)
        if self._deals_samples:
            whole, rest = divmod(self._num_samples, self._samples_a_round)
            # Of an uneven last round this rank has something once those before it are served.
            needed = self._own_part.start
        elif self.split_batches:
            return length_of(self.batch_sampler)
        else:
            whole, rest = divmod(length_of(self.batch_sampler), self.num_processes)
            needed = self.process_index
        return whole + (not self.drop_last and rest > (0 if self.even_batches else needed))

    def __iter__(self) -> Iterator[Any]:
        self.last_round = None
        if self.num_processes == 1:
            return iter(self.batch_sampler)
        if self._deals_samples:
            return self._deal_samples()
        return self._split_batches() if self.split_batches else self._deal_batches()

    def _deal_samples(self) -> Iterator[list[Any]]:
        size, own = self._samples_a_round, self._own_part
        # The samples come from the sampler itself: what its batch sampler skips is skipped here.
        samples = itertools.islice(self.sampler, self._num_skipped, None)
        first = samples_of_round = [*itertools.islice(samples, size)]
        while len(samples_of_round) == size:
            yield samples_of_round[own]
            samples_of_round = [*itertools.islice(samples, size)]
        if not samples_of_round or self.drop_last:
            return
        filled = _fill(samples_of_round, first, size) if self.even_batches else samples_of_round
        batch = filled[own]
        # Before the yield: the loader asks for it while the loop has the batch.
        self.last_round = LastRound(len(samples_of_round), len(batch), len(samples_of_round[own]))
        if batch:
            yield batch

    def _split_batches(self) -> Iterator[list[Any]]:
        """Divide each batch of a user's own batch sampler, whatever its size."""
        batches = iter(self.batch_sampler)
        batch: Any = next(batches, ())
        for following in batches:
            # Every rank needs a sample of each batch before the last, or it would end too early.
            yield self._part_of(batch, at_least=1)
            batch = following
        if not len(batch) or (self.drop_last and len(batch) < self.batch_size):
            return
        part = self._part_of(batch, at_least=int(self.even_batches))
        self.last_round = LastRound(len(batch), len(part), len(self._part_of(batch, at_least=0)))
        if len(part):
            yield part

    def _part_of(self, batch: Any, *, at_least: int) -> Any:
        """This rank's samples of a batch: the first ranks get one more where some are left.

        A rank for which nothing is left gets the first ``at_least`` samples, which another rank
        has too.
        """
        size, extra = divmod(len(batch), self.num_processes)
        start = size * self.process_index + min(self.process_index, extra)
        stop = start + size + (self.process_index < extra)
        return batch[start:stop] if stop > start else batch[:at_least]

    def _deal_batches(self) -> Iterator[Any]:
        """Deal out the batches of a user's own batch sampler, each whole."""
        batches, size = iter(self.batch_sampler), self.num_processes
        first = batches_of_round = [*itertools.islice(batches, size)]
        # One round ahead: only the last one may need filling up.
        while following := [*itertools.islice(batches, size)]:
            yield batches_of_round[self.process_index]
            batches_of_round = following
        num_batches = len(batches_of_round)
        if not num_batches or (num_batches < size and self.drop_last):
            return
        filled = _fill(batches_of_round, first, size) if self.even_batches else batches_of_round
        if self.process_index < len(filled):
            batch = filled[self.process_index]
            rows = len(batch) if isinstance(batch, Sized) else None
            is_repeated = self.process_index >= num_batches
            kept = 0 if is_repeated else 1 if rows is None else rows
            # Batches may differ in size, so that no rank knows how many samples all have.
            self.last_round = LastRound(-1, rows, kept)
            yield batch


def has_own_batches(batch_sampler: Any) -> bool:
    """Whether a batch sampler makes its batches in a way of its own, rather than as torch's."""
    while isinstance(batch_sampler, SkipBatchSampler):
        batch_sampler = batch_sampler.batch_sampler
    return type(batch_sampler).__iter__ is not BatchSampler.__iter__


def length_of(sized: Any) -> int:
    """Its length; torch's types do not say that samplers and datasets may have one."""
    return len(sized)


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.sampler = getattr(batch_sampler, "sampler", batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not there yet: while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, length_of(self.batch_sampler) - self.skip_batches)


class SeedableRandomSampler(RandomSampler):
    """A random order that depends on a seed and the number of the epoch alone.

    Args:
        *args: those of torch's ``RandomSampler``.
        data_seed: the seed; None takes that of torch's global random numbers.
        **kwargs: those of torch's ``RandomSampler``.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0
        self._is_agreed = data_seed is not None

    def agree_on_seed(self) -> None:
        """Take rank 0's seed, unless one was given: ranks that differ would share out badly."""
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
        seeded = torch.Generator().manual_seed(_as_seed(self.initial_seed + epoch))
        order = RandomSampler(
            self.data_source, self.replacement, self._num_samples, generator=seeded
        )
        yield from order
        self.epoch = epoch + 1


def _as_seed(value: int) -> int:
    return value & 0xFFFF_FFFF_FFFF_FFFF


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one rank, out of an iterable dataset that all ranks read alike.

    Args:
        dataset: gives the same samples in the same order on every rank.
        batch_size: of the loader.
        drop_last: leave out a last round that lacks samples.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: divide each batch over the ranks, rather than deal out whole ones.
        even_batches: fill the last round up with samples from the start.
        marks_tail: say of each sample of a last round that it is, for :class:`TailCollate`.

    Raises:
        ConfigError: ``split_batches`` with a batch size that cannot be divided.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        marks_tail: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.marks_tail = marks_tail
        # Without a batch size each sample is a batch that the dataset has made.
        share = 1 if batch_size is None else share_of(batch_size, num_processes, split_batches)
        self._samples_a_round = share * num_processes
        self._own_part = slice(share * process_index, share * (process_index + 1))

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may get batches of different sizes at the same step."""
        is_filled = self.even_batches or self.drop_last
        return self.num_processes > 1 and not (is_filled and self.batch_size)

    @property
    def remainder(self) -> int:
        """Samples that the last round will have; 0 for a whole one, -1 where it is not known."""
        if self.drop_last or not isinstance(self.dataset, Sized):
            return -1
        return len(self.dataset) % self._samples_a_round

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch comes."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(length_of(self.dataset), self._samples_a_round)
        share = self._samples_a_round // self.num_processes
        if self.drop_last or not rest:
            return whole * share
        if self.even_batches:
            return (whole + 1) * share
        return whole * share + len(range(rest)[self._own_part])

    def __iter__(self) -> Iterator[Any]:
        samples, capacity, mine = iter(self.dataset), self._samples_a_round, self._own_part
        samples_of_round = [*itertools.islice(samples, capacity)]
        # The first round is kept only where it may be needed: a sample can be large.
        fills = self.even_batches and not self.drop_last
        first = samples_of_round if fills else []
        while len(samples_of_round) == capacity:
            yield from samples_of_round[mine]
            samples_of_round = [*itertools.islice(samples, capacity)]
        if samples_of_round and not self.drop_last:
            yield from self._deal_last(samples_of_round, first)

    def _deal_last(self, samples: list[Any], first: list[Any]) -> Iterator[Any]:
        filled = _fill(samples, first, self._samples_a_round) if self.even_batches else samples
        mine = filled[self._own_part]
        if not self.marks_tail:
            yield from mine
            return
        rows = None if self.batch_size is None else len(mine)
        last_round = LastRound(len(samples), rows, len(samples[self._own_part]))
        for sample in mine:
            yield _TailSample(sample, last_round)
