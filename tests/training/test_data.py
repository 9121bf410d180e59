"""Prepared loaders: what they give, and what they keep of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler as Peer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from notebook_accel import Accelerator
from notebook_accel.errors import ConfigError
from notebook_accel.training.data.dispatch import DataLoaderDispatcher
from notebook_accel.training.data.loader_wrapper import SkipDataLoader
from notebook_accel.training.data.loaders import DataLoaderShard
from notebook_accel.training.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
)
from notebook_accel.training.settings.handlers import DataLoaderConfiguration
from tests.training.harness import on_ranks
from tests.training.loading import (
    LISTS,
    TABLE,
    Sharded,
    SizedStream,
    Stream,
    lists,
    no_pass_is_left,  # noqa: F401
    numbers,
    prepare,
    read,
)

# What comes out.


@pytest.mark.parametrize("workers", [0, 2])
def test_one_rank_gets_what_the_loader_gives(workers):
    raw = numbers(10, num_workers=workers)
    prepared = prepare(raw)
    assert isinstance(prepared, DataLoaderShard)
    assert isinstance(prepared, DataLoader)
    assert lists(prepared) == lists(raw)
    assert len(prepared) == 4
    assert prepare(prepared) is prepared


def test_a_prepared_loader_says_what_it_counts():
    loader = prepare(numbers(10), 0, 2)
    assert isinstance(loader.batch_sampler, BatchSamplerShard)
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (2, 6, 10)


@pytest.mark.parametrize(
    ("config", "count", "size", "expected"),
    [
        ({}, 10, 2, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]),
        ({}, 3, 2, [[[0, 1]], [[2, 0]]]),
        ({"even_batches": False}, 9, 2, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]),
        ({"split_batches": True}, 10, 4, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]),
        ({}, 5, None, [[0, 2, 4], [1, 3, 0]]),
    ],
)
def test_streams_that_each_rank_reads(config, count, size, expected):
    for rank in range(2):
        raw = DataLoader(SizedStream(count), batch_size=size)
        prepared = prepare(raw, rank, 2, dispatch_batches=False, **config)
        assert isinstance(prepared, DataLoaderShard)
        assert isinstance(prepared.dataset, IterableDatasetShard)
        batches = list(prepared)
        assert [b.tolist() if isinstance(b, torch.Tensor) else b for b in batches] == expected[rank]
        assert len(prepared) == len(expected[rank])


class CannotSay(Stream):
    def __len__(self):
        raise NotImplementedError


def test_streams_that_cannot_say_their_length_are_read():
    joined = DataLoader(Stream(4) + Stream(4), batch_size=2)
    assert lists(prepare(joined, 1, 2, dispatch_batches=False)) == [[2, 3], [2, 3]]
    unsure = DataLoader(CannotSay(4), batch_size=2)
    for dispatched in (None, False):
        assert lists(prepare(unsure, dispatch_batches=dispatched)) == [[0, 1], [2, 3]]
    assert lists(prepare(unsure, 1, 2, dispatch_batches=False)) == [[2, 3]]


def test_a_stream_that_divides_itself_does():
    raw = DataLoader(Sharded(6), batch_size=2)
    assert lists(prepare(raw, 1, 2, dispatch_batches=False)) == [[1, 3], [5]]
    assert lists(prepare(raw, 1, 2, dispatch_batches=False, split_batches=True)) == [[1], [3], [5]]


def test_shards_that_do_not_divide_evenly_are_read_by_every_rank():
    dataset = Sharded(6)
    dataset.num_shards = 3
    raw = DataLoader(dataset, batch_size=2)
    with pytest.warns(UserWarning, match="3 shards does not divide evenly over 2 ranks"):
        prepared = prepare(raw, 1, 2, dispatch_batches=False)
    assert lists(prepared) == [[2, 3], [0, 1]]
    uneven = prepare(raw, 1, 2, dispatch_batches=False, even_batches=False)
    assert lists(uneven) == [[1, 3], [5]]


def test_streams_are_dispatched_where_batches_are_placed():
    raw = DataLoader(Stream(4), batch_size=2)
    assert isinstance(prepare(raw), DataLoaderDispatcher)
    assert lists(prepare(raw)) == [[0, 1], [2, 3]]
    assert isinstance(prepare(raw, device=None), DataLoaderShard)
    assert isinstance(prepare(raw, dispatch_batches=False), DataLoaderShard)
    assert isinstance(prepare(numbers(4), dispatch_batches=True), DataLoaderDispatcher)


@pytest.mark.parametrize("dispatched", [False, True])
def test_settings_of_a_batch_sampler_count_as_those_of_the_loader(dispatched):
    def loaders(drop_last, **config):
        batches = BatchSampler(SequentialSampler(range(9)), 4, drop_last)
        raw = DataLoader(range(12), batch_sampler=batches)
        return [prepare(raw, rank, 2, dispatch_batches=dispatched, **config) for rank in range(2)]

    for drop_last, uneven, expected in [
        (False, False, [2, 2]),
        (True, False, [1, 1]),
        (False, True, [2, 2 if dispatched else 1]),  # rank 0 fills up what it dispatches
    ]:
        made = loaders(drop_last, even_batches=not uneven)
        assert [len(loader) for loader in made] == expected
        assert [loader.total_batch_size for loader in made] == [8, 8]


def test_a_loader_that_shares_out_itself_is_left_alone():
    sampler = DistributedSampler(range(6), num_replicas=2, rank=1, shuffle=False)
    raw = numbers(6, 2, sampler=sampler)
    with pytest.warns(UserWarning, match="DistributedSampler"):
        prepared = prepare(raw, 1, 2)
    for loader in (prepared, prepare(raw, 1, 2, split_batches=True)):
        assert lists(loader) == [[1, 3], [5]]
        assert loader.total_batch_size == 4
        assert loader.progress() == (1, 0, 6), "samples of both ranks"


# What is kept of the user's loader.


@dataclass
class Own:
    """A batch of a class of one's own."""

    values: list[int]


class Moving(Own):
    moved_to: Any = None

    def to(self, device):
        self.moved_to = device
        return self


def own_init(worker):
    torch.manual_seed(1000 + worker)


class MyLoader(DataLoader):
    """A loader of one's own, which changes its batches."""

    label = "mine"

    def __iter__(self):
        return (batch + 100 for batch in super().__iter__())


def test_everything_else_is_the_users():
    raw = MyLoader(
        range(8),
        batch_size=2,
        num_workers=1,
        worker_init_fn=own_init,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=100,
        pin_memory_device="",
    )
    prepared = prepare(raw, 1, 2)
    assert isinstance(prepared, DataLoaderShard)
    assert isinstance(prepared.base_dataloader, MyLoader)
    assert prepared.label == "mine"
    same = ("num_workers", "worker_init_fn", "prefetch_factor", "persistent_workers", "timeout")
    for name in same:
        assert getattr(prepared, name) == getattr(raw, name)
    assert lists(prepared) == lists(prepared) == [[102, 103], [106, 107]]
    assert prepared.base_dataloader._iterator is not None, "the workers were not kept"
    assert raw._iterator is None
    assert lists(raw) == [[100, 101], [102, 103], [104, 105], [106, 107]]


def test_batches_are_put_on_the_device():
    def collate(samples):
        return {"x": torch.tensor(samples), "names": ["a"] * len(samples), "own": Own(samples)}

    (batch,) = prepare(numbers(3, collate_fn=collate), device=torch.device("meta"))
    assert batch["x"].device.type == "meta"
    assert batch["names"] == ["a", "a", "a"]
    assert batch["own"] == Own([0, 1, 2])
    (kept,) = prepare(numbers(3, collate_fn=collate), device=None)
    assert kept["x"].device.type == "cpu"
    (moved,) = prepare(
        numbers(3, collate_fn=Moving), device=torch.device("meta"), non_blocking=True
    )
    assert moved.moved_to == torch.device("meta")


def test_loaders_made_by_hand():
    loader = DataLoaderShard(range(16), batch_size=4, skip_batches=1)
    for index, batch in enumerate(loader):
        assert batch.tolist() == list(range(4 * index + 4, 4 * index + 8))
        assert loader.end_of_dataloader == (index == 2)
    assert len(loader) == 3
    skipping = SkipDataLoader(range(16), batch_size=4, skip_batches=2)
    assert lists(skipping) == lists(skipping) == [[8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_reach_the_gpu_from_pinned_memory(workers):
    gpu = torch.device("cuda", 0)
    streams = DataLoader(Stream(10), batch_size=3, num_workers=workers, pin_memory=True)
    sized = numbers(10, num_workers=workers, pin_memory=True)
    for raw, options in ((streams, {"dispatch_batches": False}), (sized, {})):
        batches = list(prepare(raw, 1, 2, device=gpu, non_blocking=True, **options))
        assert {batch.device for batch in batches} == {gpu}
        assert lists(batches) == [[3, 4, 5], [9, 0, 1]]


# What makes no sense.


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"batch of 3 over 2 processes.*multiple of 2"):
        prepare(numbers(6), 0, 2, split_batches=True)
    with pytest.raises(ConfigError, match=r"dispatch_batches=True.*device_placement=False"):
        prepare(numbers(6), device=None, dispatch_batches=True)
    with pytest.raises(ConfigError, match="even_batches=2: expected bool"):
        DataLoaderConfiguration(even_batches=2)
    with pytest.raises(ConfigError, match="data_seed='x': expected int"):
        DataLoaderConfiguration(data_seed="x")


# Which samples each rank gets: tables compatible with Accelerate, and lengths that are true.


def shards(batch_sampler, ranks, *, split=False, even=True, drop=False):
    options = {"split_batches": split, "even_batches": even}
    return [BatchSamplerShard(batch_sampler, ranks, rank, **options) for rank in range(ranks)]


class Plain:
    """A batch sampler of one's own, which says nothing of what is inside."""

    def __init__(self, inner):
        self.batches = list(inner)
        self.batch_size = inner.batch_size
        self.drop_last = inner.drop_last

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


# The same for a user's own batch sampler, whose samples are never mixed.
OWN_TABLE = [
    (10, 3, 2, {}, ["012 678", "345 9"]),
    (7, 3, 2, {}, ["012 6", "345 012"]),
    (2, 3, 2, {}, ["01", "01"]),
    (0, 3, 2, {}, ["", ""]),
    (10, 3, 2, {"even": False}, ["012 678", "345 9"]),
    (7, 3, 2, {"even": False}, ["012 6", "345"]),
    (10, 3, 2, {"drop": True}, ["012", "345"]),
    (9, 3, 3, {"drop": True}, ["012", "345", "678"]),
]


@pytest.mark.parametrize(
    ("is_own", "samples", "size", "ranks", "settings", "expected"),
    [*((False, *row) for row in TABLE), *((True, *row) for row in OWN_TABLE)],
)
def test_golden_values_and_batches_of_ones_own_that_stay_whole(
    is_own, samples, size, ranks, settings, expected
):
    batches = BatchSampler(
        SequentialSampler(range(samples)), size, drop_last=settings.get("drop", False)
    )
    given = shards(Plain(batches) if is_own else batches, ranks, **settings)
    assert [list(shard) for shard in given] == [read(text) for text in expected]
    assert [len(shard) for shard in given] == [len(read(text)) for text in expected]


class Buckets(BatchSampler):
    """Batches of one kind of sample each, of which some are short."""

    def __iter__(self):
        return iter([[0, 1], [2], [3, 4], [5]])

    def __len__(self):
        return 4


def test_samples_of_two_buckets_never_meet():
    buckets = Buckets(SequentialSampler(range(6)), 2, drop_last=False)
    assert [list(shard) for shard in shards(buckets, 2)] == [[[0, 1], [3, 4]], [[2], [5]]]


def test_batches_that_cannot_be_divided_are_refused():
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    with pytest.raises(ConfigError, match=r"each batch of 3 over 2 .* multiple of 2"):
        BatchSamplerShard(batches, 2, 0, split_batches=True)
    with pytest.raises(ConfigError, match="list makes batches of its own"):
        BatchSamplerShard(LISTS, 2, 0, split_batches=True)
    with pytest.raises(ConfigError, match="batch_size=None, so that its dataset makes the batches"):
        IterableDatasetShard(SizedStream(4), None, num_processes=2, split_batches=True)


def test_a_seedable_order_is_accelerates():
    for options in ({}, {"replacement": True, "num_samples": 7}, {"num_samples": 5}):
        ours, theirs = (
            kind(range(20), data_seed=4, **options) for kind in (SeedableRandomSampler, Peer)
        )
        for epoch in (None, None, 7, None):
            for sampler in (ours, theirs) if epoch else ():
                sampler.set_epoch(epoch)
            assert list(ours) == list(theirs)
            assert (ours.epoch, ours.initial_seed) == (theirs.epoch, theirs.initial_seed)


class OfOneRank(IterableDataset[int]):
    def __init__(self, rank):
        self._distributed = SimpleNamespace(rank=rank, world_size=2)

    def __iter__(self):
        yield from range(self._distributed.rank, 8, 2)


@on_ranks(2)
def test_a_split_stream_is_left_as_it_is():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    loader = accelerator.prepare(DataLoader(OfOneRank(rank), batch_size=2))
    assert lists(loader) == [[rank, rank + 2], [rank + 4, rank + 6]]
