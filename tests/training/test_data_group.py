"""Loaders, dispatch and gathering where two ranks at a time hold one model together.

Four ranks make two shares of the data: ranks 0 and 1 read the first, ranks 2 and 3 the second.
What each reads is what two plain ranks would read, and what is gathered counts each sample once.
"""

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ParallelismConfig
from notebook_accel.training.collectives import gather, gather_object, this_rank
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.data import prepare_loader
from notebook_accel.training.data.gathering import gather_for_metrics
from notebook_accel.training.data.loader_wrapper import skip_first_batches
from notebook_accel.training.settings.handlers import DataLoaderConfiguration
from tests.training.harness import on_ranks
from tests.training.loading import CPU, LISTS, SizedStream, Stream, lists, numbers, read

TENSOR = {"dp_shard_size": 2, "tp_size": 2}
# Kinds of parallelism on four ranks: which share of the data each reads, and what is asked for.
LAYOUTS = {
    "tensor": ((0, 0, 1, 1), TENSOR),
    "context": ((0, 0, 1, 1), {"dp_shard_size": 2, "cp_size": 2}),
    "pipeline": ((0, 1, 0, 1), {"dp_replicate_size": 2, "pp_size": 2}),
    "pipeline x fsdp": ((0, 1, 0, 1), {"dp_shard_size": 2, "pp_size": 2}),
}
READ_BY_ALL = {"dispatch_batches": False}
DISPATCHED = {"dispatch_batches": True}
SPLIT = {"split_batches": True}


def of_stream(stream, size=2, **options):
    return DataLoader(stream, batch_size=size, **options)


# A loader, how it is prepared, and the batches that each of two shares reads of it.
GOLDEN = {
    "filled up": (lambda: numbers(7), {}, ["012 601", "345 234"]),
    "short batches": (lambda: numbers(8), {}, ["012 670", "345 123"]),
    "fewer than shares": (lambda: numbers(2), {}, ["010", "101"]),
    "dropping": (lambda: numbers(10, drop_last=True), {}, ["012", "345"]),
    "not filled up": (lambda: numbers(10), {"even_batches": False}, ["012 678", "345 9"]),
    "split": (lambda: numbers(9, 4), SPLIT, ["01 45 80", "23 67 12"]),
    "dispatched": (lambda: numbers(10), DISPATCHED, ["012 67", "345 89"]),
    "dispatched, split": (lambda: numbers(9, 4), DISPATCHED | SPLIT, ["01 45 8", "23 67 0"]),
    "own batches": (lambda: DataLoader(range(6), batch_sampler=LISTS), {}, ["0 345", "12 0"]),
    "stream": (lambda: of_stream(Stream(10)), READ_BY_ALL, ["01 45 89", "23 67 01"]),
    "tiny stream": (lambda: of_stream(SizedStream(3)), READ_BY_ALL, ["01", "20"]),
    "stateful": (lambda: numbers(8), {"use_stateful_dataloader": True}, ["012 670", "345 123"]),
}


def prepare(loader, shares, **config):
    return prepare_loader(
        loader, config=DataLoaderConfiguration(**config), device=CPU, data_group=shares
    )


def shares_of(sizes):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    return accelerator._data_group


def read_all(shares):
    """What this rank reads of each loader, and what it gathers where all have as many batches."""
    found = {}
    for name, (make, config, _) in GOLDEN.items():
        batches, gathered = [], []
        for batch in prepare(make(), shares, **config):
            batches.append(batch.tolist())
            if "even_batches" not in config or shares.size == 2:
                gathered += gather_for_metrics(batch, group=shares.process_group).tolist()
        found[name] = batches, sorted(gathered)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_ranks_of_a_share_read_the_golden_batches(layout):
    share_of_rank, sizes = LAYOUTS[layout]
    found = read_all(shares_of(sizes))
    for name, (_, _, texts) in GOLDEN.items():
        golden = [read(text) for text in texts]
        # Gathered, each sample counts once.
        once = {index for batches in golden for batch in batches for index in batch}
        assert found[name] == (golden[share_of_rank[this_rank()]], sorted(once)), name


@on_ranks(4)
def test_ranks_that_shard_read_as_plain_ranks_do():
    plain = DataGroup.of_all_ranks(4, this_rank())
    assert lists(prepare(numbers(1, 4), plain)) == [[0, 0, 0, 0]]
    expected = read_all(plain)
    assert read_all(shares_of({"dp_replicate_size": 2, "dp_shard_size": 2})) == expected


@on_ranks(4)
def test_streams_and_orders_are_alike_within_a_share():
    shares = shares_of(TENSOR)
    torch.manual_seed(this_rank())  # ranks that differ in everything random
    index = gather(torch.tensor([shares.index]), group=shares.process_group)
    assert index.tolist() == [0, 1]
    stream = prepare(of_stream(Stream(10), 3), shares)
    assert lists(stream) == [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]][shares.index]
    skipping = skip_first_batches(prepare(numbers(8, 2), shares), 1)
    assert lists(skipping) == [[[4, 5]], [[6, 7]]][shares.index]
    shuffled = prepare(numbers(8, 2, shuffle=True), shares)
    seedable = prepare(numbers(8, 2, shuffle=True), shares, use_seedable_sampler=True)
    for loader in (shuffled, seedable):
        order = [value for batch in loader for value in batch.tolist()]
        first, same, second, alike = gather_object([order])
        assert (first, second) == (same, alike)
        assert sorted(first + second) == list(range(8))


@on_ranks(2)
def test_one_share_for_all_ranks():
    """Both ranks hold one model: there is one share, which both read."""
    shares = shares_of({"tp_size": 2})
    whole = [[0, 1, 2], [3, 4, 5], [6]]
    assert lists(prepare(of_stream(Stream(7), 3), shares)) == whole
    plain = lists(prepare(numbers(7, 3), shares))
    assert plain == whole
    for batch in prepare(numbers(7, 3), shares):
        assert torch.equal(gather_for_metrics(batch, group=shares.process_group), batch)
