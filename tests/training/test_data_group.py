"""Loaders, dispatch and gathering where two ranks at a time hold one model together.

Four ranks make two shares of the data: ranks 0 and 1 read the first, ranks 2 and 3 the second.
What each reads is what two plain ranks would read, and what is gathered counts each sample once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from notebook_accel import Accelerator, ParallelismConfig
from notebook_accel.training.collectives import gather, this_rank
from notebook_accel.training.data import prepare_data_loader, skip_first_batches
from notebook_accel.training.data.config import DataLoaderConfiguration
from notebook_accel.training.data.gathering import gather_for_metrics
from notebook_accel.training.data_group import DataGroup, current_data_group
from tests.training.harness import run_ranks
from tests.training.loading import CPU, SizedStream, Stream, lists, numbers

INDEX_OF_RANK = (0, 0, 1, 1)
# Kinds of parallelism on four ranks, which ranks read the same, and what is asked for.
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "tensor": (INDEX_OF_RANK, {"dp_shard_size": 2, "tp_size": 2}),
    "pipeline": ((0, 1, 0, 1), {"dp_replicate_size": 2, "pp_size": 2}),
}

# The golden values of two plain ranks: name, loader, settings, what each share reads.
GOLDEN: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
    "uneven": ((8, 3), {}, [[[0, 1, 2], [6, 7, 0]], [[3, 4, 5], [1, 2, 3]]]),
    "whole batch missing": ((9, 3), {}, [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [0, 1, 2]]]),
    "tiny": ((2, 3), {}, [[[0, 1, 0]], [[1, 0, 1]]]),
    "not filled up": (
        (10, 3),
        {"even_batches": False},
        [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9]]],
    ),
    "split": (
        (10, 4),
        {"split_batches": True},
        [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]],
    ),
    "dispatched": (
        (10, 3),
        {"dispatch_batches": True},
        [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]],
    ),
    "dispatched, split": (
        (9, 4),
        {"dispatch_batches": True, "split_batches": True},
        [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [0]]],
    ),
}


def two_shares() -> DataGroup:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    index = INDEX_OF_RANK[this_rank()]
    return DataGroup(2, index, INDEX_OF_RANK, groups[this_rank() % 2])


def prepare(loader: Any, shares: DataGroup, **config: Any) -> Any:
    return prepare_data_loader(
        loader, config=DataLoaderConfiguration(**config), device=CPU, data_group=shares
    )


def read_all(layout: str) -> dict[str, Any]:
    sizes = ParallelismConfig(**LAYOUTS[layout][1])
    Accelerator(cpu=True, parallelism_config=sizes)
    shares = current_data_group()
    assert shares is not None
    return read_golden(shares, GOLDEN)


def read_golden(shares: DataGroup, cases: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (args, config, _) in cases.items():
        loader = prepare(numbers(*args), shares, **config)
        batches, gathered = [], []
        for batch in loader:
            batches.append(batch.tolist())
            gathered += gather_for_metrics(batch, group=shares.process_group).tolist()
        found[name] = batches, gathered
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_share_read_the_golden_batches(layout: str) -> None:
    results = run_ranks(read_all, 4, layout)
    for name, ((count, _), _, golden) in GOLDEN.items():
        assert [found[name][0] for found in results] == [
            golden[share] for share in LAYOUTS[layout][0]
        ]
        # Gathered, each sample counts once.
        assert [sorted(found[name][1]) for found in results] == [list(range(count))] * 4


def read_with_replicas_of_shards() -> tuple[dict[str, Any], dict[str, Any]]:
    """What four ranks read that shard the model two by two, and what four plain ranks do."""
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    Accelerator(cpu=True, parallelism_config=sizes)
    shares = current_data_group()
    assert shares is not None
    plain = DataGroup.of_all_ranks(4, this_rank())
    cases = {**GOLDEN, "tiny": ((1, 4), {}, None)}
    return read_golden(shares, cases), read_golden(plain, cases)


def test_ranks_that_shard_read_as_plain_ranks_do() -> None:
    results = run_ranks(read_with_replicas_of_shards, 4)
    for own, plain in results:
        assert own == plain
    assert [own["tiny"][0] for own, _ in results] == [[[0, 0, 0, 0]]] * 4


def read_streams() -> dict[str, Any]:
    shares = two_shares()
    torch.manual_seed(this_rank())  # ranks that differ in everything random
    shuffled = prepare(numbers(8, 2, shuffle=True), shares)
    once = prepare(numbers(8, 2, shuffle=True, drop_last=True), shares, use_seedable_sampler=True)
    loaders = {
        "stream": prepare(numbers_of(Stream(10)), shares),
        "sized stream": prepare(numbers_of(SizedStream(10)), shares, dispatch_batches=False),
        "shuffled": shuffled,
        "seedable": once,
        "skipping": skip_first_batches(prepare(numbers(8, 2), shares), 1),
    }
    found: dict[str, Any] = {}
    for name, loader in loaders.items():
        found[name] = lists(loader)
    whole = gather(torch.tensor([shares.index]), group=shares.process_group)
    return {**found, "gathered": whole.tolist()}


def numbers_of(stream: Any) -> Any:
    return torch.utils.data.DataLoader(stream, batch_size=3)


def test_streams_and_orders_are_alike_within_a_share() -> None:
    results = run_ranks(read_streams, 4)
    for first, second in ((0, 1), (2, 3)):
        assert results[first] == results[second]
    zero, two = results[0], results[2]
    assert zero["stream"] == [[0, 1, 2], [6, 7]]
    assert two["stream"] == [[3, 4, 5], [8, 9]]
    assert two["sized stream"] == [[3, 4, 5], [9, 0, 1]]
    for name in ("shuffled", "seedable"):
        assert sorted(i for batch in zero[name] + two[name] for i in batch) == list(range(8))
    assert zero["skipping"] == [[4, 5]]
    assert zero["gathered"] == [0, 1]


def read_alone() -> dict[str, Any]:
    """Both ranks hold one model: there is one share, which both read."""
    shares = DataGroup(1, 0, (0, 0), [dist.new_group([0]), dist.new_group([1])][this_rank()])
    stream = prepare(numbers_of(Stream(7)), shares)
    plain = prepare(numbers(7, 3), shares)
    return {
        "stream": lists(stream),
        "plain": lists(plain),
        "gathered": [gather_for_metrics(b, group=shares.process_group).tolist() for b in plain],
    }


def test_one_share_for_all_ranks() -> None:
    whole = [[0, 1, 2], [3, 4, 5], [6]]
    expected = {"stream": whole, "plain": whole, "gathered": whole}
    assert run_ranks(read_alone, 2) == [expected] * 2
