"""Which samples each rank gets: ACCELERATE-compatible tables, and lengths that are true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler as Peer
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from notebook_accel.errors import ConfigError
from notebook_accel.training.data.samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from notebook_accel.training.data.streams import IterableDatasetShard
from notebook_accel.training.stepping.active_loaders import ShortRound
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
    (10, 4, 2, {"split": True}, ["01 45 8", "23 67 9"]),
    (9, 4, 2, {"split": True}, ["01 45 8", "23 67 8"]),
    (9, 4, 2, {"split": True, "even": False}, ["01 45 8", "23 67"]),
    (10, 4, 2, {"split": True, "drop": True}, ["01 45", "23 67"]),
    (10, 6, 3, {"split": True}, ["01 67", "23 8", "45 9"]),
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
    if settings.get("split") and not settings.get("even", True):
        return  # whether the last part is empty cannot be known before
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


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_samples_of_two_buckets_never_meet(split: bool, even: bool) -> None:
    buckets = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [12]]
    kinds = {sample: kind for kind, bucket in enumerate(buckets) for sample in bucket}
    given = [list(shard) for shard in shards(Buckets(buckets, 4), 2, split=split, even=even)]
    assert all(len({kinds[sample] for sample in batch}) == 1 for own in given for batch in own)
    assert {sample for own in given for batch in own for sample in batch} == set(kinds)
    lengths = {len(own) for own in given}
    assert len(lengths) == 1 or not even


def test_batches_that_are_larger_than_they_said_are_divided_too() -> None:
    batches = Plain(BatchSampler(SequentialSampler(range(12)), 6, drop_last=False))
    batches.batch_size = 4
    assert [list(shard) for shard in shards(batches, 2, split=True)] == [
        [[0, 1, 2], [6, 7, 8]],
        [[3, 4, 5], [9, 10, 11]],
    ]


def test_a_loader_that_skips_batches_shares_out_samples_too() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    given = shards(SkipBatchSampler(SkipBatchSampler(batches, 1), 1), 2)
    assert [list(shard) for shard in given] == [[[6, 7, 8]], [[9, 6, 7]]]
    assert [len(shard) for shard in given] == [1, 1]
    assert [shard.remainder for shard in given] == [4, 4]
    assert given[0].total_length == 2


@pytest.mark.parametrize(
    ("even", "expected"),
    [(True, [[[0], [3, 4, 5]], [[1, 2], [0]]]), (False, [[[0], [3, 4, 5]], [[1, 2]]])],
)
def test_batches_without_a_size_are_repeated_whole(even: bool, expected: Any) -> None:
    given = shards(LISTS, 2, even=even)
    assert [list(shard) for shard in given] == expected
    assert [len(shard) for shard in given] == [len(batches) for batches in expected]


def test_single_indices_are_given_out_too() -> None:
    given = shards(SequentialSampler(range(5)), 2)
    assert [list(shard) for shard in given] == [[0, 2, 4], [1, 3, 0]]


def test_the_last_round_says_what_is_repeated() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    first, second = shards(batches, 2)
    assert first.remainder == 4
    assert first.newest_pass.last_round is None
    list(first), list(second)
    assert first.newest_pass.last_round == ShortRound(
        num_samples=4, batch_size=3, num_own_samples=3
    )
    assert second.newest_pass.last_round == ShortRound(
        num_samples=4, batch_size=3, num_own_samples=1
    )
    whole = shards(BatchSampler(SequentialSampler(range(12)), 3, drop_last=False), 2)[0]
    assert whole.remainder == 0
    list(whole)
    assert whole.newest_pass.last_round is None


def test_unevenness_is_known_before_the_pass() -> None:
    plain = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    dropping = BatchSampler(SequentialSampler(range(10)), 3, drop_last=True)
    assert not shards(plain, 2)[0].is_uneven
    assert shards(plain, 2, even=False)[0].is_uneven
    assert not shards(dropping, 2, even=False)[0].is_uneven
    assert shards(Plain(plain), 2)[0].is_uneven
    assert not shards(Plain(plain), 1)[0].is_uneven


def test_batches_that_cannot_be_divided_are_refused() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    with pytest.raises(ConfigError, match=r"each batch of 3 over 2 .* multiple of 2"):
        BatchSamplerShard(batches, 2, 0, split_batches=True)
    with pytest.raises(ConfigError, match="list has no batch_size"):
        BatchSamplerShard(LISTS, 2, 0, split_batches=True)
    with pytest.raises(ConfigError, match="batch_size=None, so that its dataset makes the batches"):
        IterableDatasetShard(Stream(4), None, num_processes=2, split_batches=True)


def test_a_shard_may_be_told_another_place_and_other_batches() -> None:
    (shard, _) = shards(BatchSampler(SequentialSampler(range(8)), 2, drop_last=False), 2)
    shard.num_processes, shard.process_index = 4, 3
    assert (len(shard), list(shard)) == (1, [[6, 7]])
    shard.num_processes, shard.process_index = 1, 0
    assert (len(shard), len(list(shard))) == (4, 4)
    shard.num_processes = 2
    shard.batch_sampler.sampler = range(20, 24)
    assert list(shard) == [[20, 21]]
    shard.batch_sampler = BatchSampler(SequentialSampler(range(9)), 3, drop_last=True)
    assert (len(shard), list(shard)) == (1, [[0, 1, 2]])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_long_order_is_covered_once(ranks: int) -> None:
    order = torch.Generator()
    sampler = RandomSampler(range(1003), generator=order)
    batches = BatchSampler(sampler, 8, drop_last=False)
    seen = []
    for shard in shards(batches, ranks, even=False):
        order.manual_seed(3)
        seen += [index for batch in shard for index in batch]
    assert sorted(seen) == list(range(1003))


def test_skipping_batches() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    skipping = SkipBatchSampler(batches, 2)
    assert list(skipping) == [[6, 7, 8], [9]]
    assert len(skipping) == 2
    assert list(SkipBatchSampler(batches, 9)) == []
    assert len(SkipBatchSampler(batches, 9)) == 0
    assert skipping.batch_size == 3


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


@pytest.mark.parametrize(
    ("samples", "size", "ranks", "settings", "expected"),
    [
        (10, 2, 2, {}, ["014589", "236701"]),
        (3, 2, 2, {}, ["01", "20"]),
        (10, 2, 2, {"drop_last": True}, ["0145", "2367"]),
        (10, 2, 2, {"even_batches": False}, ["014589", "2367"]),
        (9, 2, 2, {"even_batches": False}, ["01458", "2367"]),
        (10, 4, 2, {"split_batches": True}, ["014589", "236701"]),
        (1, 2, 3, {}, ["00", "00", "00"]),
        (0, 2, 2, {}, ["", ""]),
        (5, None, 2, {}, ["024", "130"]),
    ],
)
def test_golden_values_of_streams(
    samples: int, size: int | None, ranks: int, settings: dict[str, bool], expected: list[str]
) -> None:
    given = [
        IterableDatasetShard(
            Stream(samples), size, num_processes=ranks, process_index=rank, **settings
        )
        for rank in range(ranks)
    ]
    assert ["".join(map(str, shard)) for shard in given] == expected
    assert [len(shard) for shard in given] == [len(text) for text in expected]
