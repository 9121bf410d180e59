"""The order of prepared loaders: the seed's, the user's, and the same on every rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from notebook_accel.training.processes.random_numbers import set_seed
from tests.training.loading import Stream, lists, numbers, prepare

# Order.


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(range(12)),
        lambda: RandomSampler(range(12), replacement=True, num_samples=24),
        lambda: WeightedRandomSampler([1.0] * 12, 12),
        lambda: SubsetRandomSampler(range(12)),
        lambda: SequentialSampler(range(12)),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2])
def test_a_pass_draws_nothing_from_the_global_numbers(
    sampler: Any, workers: int, size: int
) -> None:
    before = torch.get_rng_state()
    prepared = prepare(numbers(12, sampler=sampler(), num_workers=workers), 0, size)
    first, second = lists(prepared), lists(prepared)
    assert torch.equal(torch.get_rng_state(), before)
    assert (first == second) == isinstance(prepared.sampler, SequentialSampler)


def test_the_order_follows_from_the_seed() -> None:
    def order(seed: int, ordinal: int = 0) -> Any:
        set_seed(seed)
        return lists(prepare(numbers(20, shuffle=True), ordinal=ordinal))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != order(1, ordinal=1), "two loaders go through their data alike"


def test_a_generator_of_ones_own_gives_the_order_that_it_gives_torch() -> None:
    def loader() -> DataLoader[Any]:
        return numbers(20, shuffle=True, generator=torch.Generator().manual_seed(5))

    raw, prepared = loader(), prepare(loader())
    for _ in range(3):
        assert lists(prepared) == lists(raw)


def test_the_seedable_order() -> None:
    def loader(rank: int = 0, size: int = 1, **config: Any) -> Any:
        return prepare(numbers(8, 2, shuffle=True), rank, size, use_seedable_sampler=True, **config)

    first = loader(data_seed=1)
    epochs = [lists(first), lists(first)]
    assert epochs[0] != epochs[1]
    again = loader(data_seed=1)
    again.set_epoch(1)
    assert lists(again) == epochs[1]
    batches = BatchSampler(RandomSampler(range(8)), 2, drop_last=False)
    raw: Any = DataLoader(torch.arange(8), sampler=batches, batch_size=None)  # type: ignore[arg-type]
    as_sampler = prepare(raw, use_seedable_sampler=True, data_seed=1)
    assert [lists(as_sampler), lists(as_sampler)] == epochs
    halves = [lists(loader(rank, 2, data_seed=1)) for rank in range(2)]
    assert list(itertools.chain(*zip(*halves, strict=True))) == epochs[0]
    set_seed(4)
    from_seed = lists(loader())
    assert from_seed == lists(loader(data_seed=4))


def test_whoever_sets_the_epoch_last_is_heard() -> None:
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0)  # type: ignore[arg-type]
    prepared = prepare(numbers(8, sampler=sampler))
    for epoch in (0, 5, 3):
        sampler.set_epoch(epoch)
        expected = list(sampler)
        assert [value for batch in prepared for value in batch.tolist()] == expected


def test_an_epoch_is_over_with_its_last_batch() -> None:
    prepared = prepare(numbers(4, 2, shuffle=True), use_seedable_sampler=True, data_seed=1)
    passed = iter(prepared)
    seen = [next(passed).tolist() for _ in range(len(prepared))]
    passed = iter(prepared)  # begun before the first one is gone
    assert [next(passed).tolist() for _ in range(len(prepared))] != seen
    passed.close()
    assert prepared.iteration == 2


@pytest.mark.parametrize("num_given", [1, 2])  # after 2, the indices of the last batch are taken
def test_an_epoch_that_was_left_comes_again(num_given: int) -> None:
    prepared = prepare(numbers(10, 4, shuffle=True), use_seedable_sampler=True, data_seed=1)
    left = iter(prepared)
    first = [next(left).tolist() for _ in range(num_given)]
    left.close()
    assert prepared.iteration == 0
    again = lists(prepared)
    assert again[:num_given] == first
    assert prepared.iteration == 1
    assert lists(prepared) != again


def test_the_epoch_reaches_samplers_and_datasets() -> None:
    class Sampler(SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    prepared = prepare(numbers(4, 1, sampler=Sampler(range(4))), 0, 2)
    list(prepared), list(prepared)
    prepared.set_epoch(7)
    next(iter(prepared))  # an epoch that is left comes again
    assert Sampler.epochs == [1, 2, 7]
    stream = Stream(4)
    loader = prepare(DataLoader(stream, batch_size=2), 0, 2, dispatch_batches=False)
    loader.set_epoch(3)
    assert stream.epoch == 3


class Draws:
    """A dataset whose samples are random numbers of the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 60, ()))


def test_workers_of_two_ranks_draw_different_numbers() -> None:
    def draws(rank: int) -> Any:
        own = torch.Generator().manual_seed(3)
        raw = DataLoader(Draws(), num_workers=1, generator=own)  # type: ignore[arg-type]
        return prepare(raw, rank, 2, even_batches=False)

    first, second = draws(0), draws(1)
    epochs = [str(lists(first)), str(lists(second)), str(lists(first)), str(lists(draws(0)))]
    assert len(set(epochs)) == 3
    assert epochs[0] == epochs[3]
