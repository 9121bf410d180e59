"""Loaders, dispatch and gathering where two ranks at a time hold one model together.

Four ranks make two shares of the data: ranks 0 and 1 read the first, ranks 2 and 3 the second.
What each reads is what two plain ranks would read, and what is gathered counts each sample once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ParallelismConfig
from notebook_accel.training.collectives import gather, gather_object, this_rank
from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.data import prepare_loader
from notebook_accel.training.data.gathering import gather_for_metrics
from notebook_accel.training.data.loader_wrapper import skip_first_batches
from notebook_accel.training.settings.handlers import DataLoaderConfiguration
from tests.training.harness import on_ranks
from tests.training.loading import CPU, LISTS, TABLE, SizedStream, Stream, lists, numbers, read

INDEX_OF_RANK = (0, 0, 1, 1)
# Kinds of parallelism on four ranks, which ranks read the same, and what is asked for.
LAYOUTS = {
    "tensor": (INDEX_OF_RANK, {"dp_shard_size": 2, "tp_size": 2}),
    "context": (INDEX_OF_RANK, {"dp_shard_size": 2, "cp_size": 2}),
    "pipeline": ((0, 1, 0, 1), {"dp_replicate_size": 2, "pp_size": 2}),
    "pipeline x fsdp": ((0, 1, 0, 1), {"dp_shard_size": 2, "pp_size": 2}),
}


@dataclass(frozen=True)
class Case:
    """A loader, how it is prepared, and the batches that each of two shares reads of it."""

    make: Callable[[], Any]
    golden: list[str]
    config: dict[str, Any] = field(default_factory=dict)

    def gathers(self, shares):
        """Whether all shares have as many batches, so that a loop may gather."""
        if self.config.get("even_batches", True):
            return True
        return shares == 2 and len({len(text.split()) for text in self.golden}) == 1


def of_stream(stream, size=3, **options):
    return DataLoader(stream, batch_size=size, **options)


def of_lists():
    return DataLoader(range(6), batch_sampler=LISTS)


SETTINGS = {"even": "even_batches", "split": "split_batches"}
READ_BY_ALL = {"dispatch_batches": False}
GOLDEN = {
    **{
        f"{samples} by {size} {settings}": Case(
            partial(numbers, samples, size, drop_last=settings.get("drop", False)),
            golden,
            {SETTINGS[name]: value for name, value in settings.items() if name in SETTINGS},
        )
        for samples, size, ranks, settings, golden in TABLE
        if ranks == 2
    },
    "dispatched": Case(partial(numbers, 10, 3), ["012 67", "345 89"], {"dispatch_batches": True}),
    "dispatched, split": Case(
        partial(numbers, 9, 4),
        ["01 45 8", "23 67 0"],
        {"dispatch_batches": True, "split_batches": True},
    ),
    "batches of one's own": Case(of_lists, ["0 345", "12 0"]),
    "batches of one's own, uneven": Case(of_lists, ["0 345", "12"], {"even_batches": False}),
    "stream": Case(partial(of_stream, Stream(10), 2), ["01 45 89", "23 67 01"], READ_BY_ALL),
    "tiny stream": Case(partial(of_stream, SizedStream(3), 2), ["01", "20"], READ_BY_ALL),
    "dropping stream": Case(
        partial(of_stream, Stream(10), 2, drop_last=True), ["01 45", "23 67"], READ_BY_ALL
    ),
    "stateful": Case(
        partial(numbers, 8), ["012 670", "345 123"], {"use_stateful_dataloader": True}
    ),
    "stateful stream": Case(
        partial(of_stream, Stream(10), 2),
        ["01 45 89", "23 67 01"],
        {"use_stateful_dataloader": True, **READ_BY_ALL},
    ),
}


def two_shares():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    index = INDEX_OF_RANK[this_rank()]
    return DataGroup(2, index, INDEX_OF_RANK, groups[this_rank() % 2])


def prepare(loader, shares, **config):
    return prepare_loader(
        loader, config=DataLoaderConfiguration(**config), device=CPU, data_group=shares
    )


def shares_of(sizes):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    return accelerator._data_group


def read_all(shares):
    """What this rank reads of each loader, and what it gathers."""
    found = {}
    for name, case in GOLDEN.items():
        batches, gathered = [], []
        for batch in prepare(case.make(), shares, **case.config):
            batches.append(batch.tolist())
            if case.gathers(shares.size):
                gathered += gather_for_metrics(batch, group=shares.process_group).tolist()
        found[name] = batches, sorted(gathered)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_ranks_of_a_share_read_the_golden_batches(layout):
    share_of_rank, sizes = LAYOUTS[layout]
    found = read_all(shares_of(sizes))
    for name, case in GOLDEN.items():
        golden = [read(text) for text in case.golden]
        batches, gathered = found[name]
        assert batches == golden[share_of_rank[this_rank()]], name
        # Gathered, each sample counts once.
        once = {index for batches in golden for batch in batches for index in batch}
        assert gathered == (sorted(once) if case.gathers(2) else []), name


@on_ranks(4)
def test_ranks_that_shard_read_as_plain_ranks_do():
    plain = DataGroup.of_all_ranks(4, this_rank())
    assert lists(prepare(numbers(1, 4), plain)) == [[0, 0, 0, 0]]
    expected = read_all(plain)
    assert read_all(shares_of({"dp_replicate_size": 2, "dp_shard_size": 2})) == expected


@on_ranks(4)
def test_streams_and_orders_are_alike_within_a_share():
    shares = two_shares()
    torch.manual_seed(this_rank())  # ranks that differ in everything random
    index = gather(torch.tensor([shares.index]), group=shares.process_group)
    assert index.tolist() == [0, 1]
    stream = prepare(of_stream(Stream(10)), shares)
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
    shares = DataGroup(1, 0, (0, 0), [dist.new_group([0]), dist.new_group([1])][this_rank()])
    whole = [[0, 1, 2], [3, 4, 5], [6]]
    assert lists(prepare(of_stream(Stream(7)), shares)) == whole
    plain = lists(prepare(numbers(7, 3), shares))
    assert plain == whole
    for batch in prepare(numbers(7, 3), shares):
        assert torch.equal(gather_for_metrics(batch, group=shares.process_group), batch)
