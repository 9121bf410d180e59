"""Which samples each rank gets: ACCELERATE-compatible tables, and lengths that are true."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate.data_loader import SeedableRandomSampler as Peer
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from notebook_accel.errors import ConfigError
from notebook_accel.training.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from tests.training.loading import LISTS, TABLE, read


def shards(batch_sampler: Any, ranks: int, **settings: bool) -> list[BatchSamplerShard]:
    return [
        BatchSamplerShard(
            batch_sampler,
            ranks,
            rank,
            split_batches=settings.get("split", False),
            even_batches=settings.get("even", True),
        )
        for rank in range(ranks)
    ]


class Plain:
    """A batch sampler of one's own, which says nothing of what is inside."""

    def __init__(self, inner: BatchSampler) -> None:
        self.batches = list(inner)
        self.batch_size = inner.batch_size
        self.drop_last = inner.drop_last

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize(("samples", "size", "ranks", "settings", "expected"), TABLE)
def test_golden_values(
    samples: int, size: int, ranks: int, settings: dict[str, bool], expected: list[str]
) -> None:
    batches = BatchSampler(
        SequentialSampler(range(samples)), size, drop_last=settings.get("drop", False)
    )
    given = shards(batches, ranks, **settings)
    assert [list(shard) for shard in given] == [read(text) for text in expected]
    assert [len(shard) for shard in given] == [len(read(text)) for text in expected]


# The same for a user's own batch sampler, whose samples are never mixed.
OWN_TABLE = [
    (8, 3, 2, {}, ["012 67", "345 012"]),
    (9, 3, 2, {}, ["012 678", "345 012"]),
    (10, 3, 2, {}, ["012 678", "345 9"]),
    (7, 3, 2, {}, ["012 6", "345 012"]),
    (2, 3, 2, {}, ["01", "01"]),
    (0, 3, 2, {}, ["", ""]),
    (10, 3, 1, {}, ["012 345 678 9"]),
    (10, 2, 3, {}, ["01 67", "23 89", "45 01"]),
    (10, 3, 2, {"even": False}, ["012 678", "345 9"]),
    (7, 3, 2, {"even": False}, ["012 6", "345"]),
    (10, 3, 2, {"drop": True}, ["012", "345"]),
    (9, 3, 3, {"drop": True}, ["012", "345", "678"]),
]


@pytest.mark.parametrize(("samples", "size", "ranks", "settings", "expected"), OWN_TABLE)
def test_batches_of_ones_own_stay_whole(
    samples: int, size: int, ranks: int, settings: dict[str, bool], expected: list[str]
) -> None:
    batches = BatchSampler(
        SequentialSampler(range(samples)), size, drop_last=settings.get("drop", False)
    )
    given = shards(Plain(batches), ranks, **settings)
    assert [list(shard) for shard in given] == [read(text) for text in expected]
    assert [len(shard) for shard in given] == [len(read(text)) for text in expected]


class Buckets(BatchSampler):
    """Batches of one kind of sample each, of which some are short."""

    def __init__(self, buckets: list[list[int]], size: int) -> None:
        super().__init__(SequentialSampler(range(sum(map(len, buckets)))), size, drop_last=False)
        self.buckets = buckets

    def __iter__(self) -> Any:
        for bucket in self.buckets:
            yield from (
                bucket[start : start + self.batch_size]
                for start in range(0, len(bucket), self.batch_size)
            )

    def __len__(self) -> int:
        return sum(-(-len(bucket) // self.batch_size) for bucket in self.buckets)


@pytest.mark.parametrize("even", [False, True])
def test_samples_of_two_buckets_never_meet(even: bool) -> None:
    buckets = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [12]]
    kinds = {sample: kind for kind, bucket in enumerate(buckets) for sample in bucket}
    given = [list(shard) for shard in shards(Buckets(buckets, 4), 2, even=even)]
    assert all(len({kinds[sample] for sample in batch}) == 1 for own in given for batch in own)
    assert {sample for own in given for batch in own for sample in batch} == set(kinds)
    lengths = {len(own) for own in given}
    assert len(lengths) == 1 or not even


def test_a_loader_that_skips_batches_shares_out_samples_too() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    given = shards(SkipBatchSampler(SkipBatchSampler(batches, 1), 1), 2)
    assert [list(shard) for shard in given] == [[[6, 7, 8]], [[9, 6, 7]]]
    assert [len(shard) for shard in given] == [1, 1]
    assert [shard.num_samples for shard in given] == [4, 4]
    assert given[0].total_length == 2


def test_batches_that_cannot_be_divided_are_refused() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    with pytest.raises(ConfigError, match=r"each batch of 3 over 2 .* multiple of 2"):
        BatchSamplerShard(batches, 2, 0, split_batches=True)
    with pytest.raises(ConfigError, match="list makes batches of its own"):
        BatchSamplerShard(LISTS, 2, 0, split_batches=True)
    with pytest.raises(ConfigError, match="batch_size=None, so that its dataset makes the batches"):
        IterableDatasetShard(Stream(4), None, num_processes=2, split_batches=True)


def test_a_seedable_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = SeedableRandomSampler(range(20), data_seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert order(1, 1) == order(2, 0)  # seed + epoch, as its users count on
    assert order(1, 0) != order(1, 1)
    assert sorted(order(5, 3)) == list(range(20))
    for options in ({}, {"replacement": True, "num_samples": 7}, {"num_samples": 5}):
        ours, theirs = (
            kind(range(20), data_seed=4, **options) for kind in (SeedableRandomSampler, Peer)
        )
        for _ in range(3):
            assert list(ours) == list(theirs), "Accelerate's order"
            assert (ours.epoch, ours.initial_seed) == (theirs.epoch, theirs.initial_seed)
    one_by_one = SeedableRandomSampler(range(20), data_seed=1)
    assert [list(one_by_one), list(one_by_one)] == [order(1, 0), order(1, 1)]


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count
