"""The order of prepared loaders: the seed's, the user's, and the same on every rank."""

import itertools
import pickle
from typing import Any

import pytest
import torch
from notebook_accel.data_loader import DataLoaderShard, prepare_data_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from notebook_accel import Accelerator
from notebook_accel.errors import ConfigError, RunStopped
from notebook_accel.rank import this_rank as ranks
from notebook_accel.training.data.loader_wrapper import skip_first_batches
from notebook_accel.training.processes.random_numbers import set_seed
from notebook_accel.training.settings.handlers import GradientAccumulationPlugin
from notebook_accel.training.stepping.accumulation import Accumulation, GradientState
from notebook_accel.training.stepping.active_loaders import active_loaders
from tests.training.loading import (
    SizedStream,
    Stream,
    lists,
    no_pass_is_left,  # noqa: F401
    numbers,
    prepare,
)
from tests.training.single import be

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
def test_a_pass_draws_nothing_from_the_global_numbers(sampler, workers, size):
    before = torch.get_rng_state()
    prepared = prepare(numbers(12, sampler=sampler(), num_workers=workers), 0, size)
    first, second = lists(prepared), lists(prepared)
    assert torch.equal(torch.get_rng_state(), before)
    assert (first == second) == isinstance(prepared.sampler, SequentialSampler)


def test_each_loader_has_an_order_of_its_own_that_follows_from_the_seed():
    def orders(seed):
        set_seed(seed)
        plain = [numbers(20, shuffle=True) for _ in range(4)]
        loaders = [*Accelerator(cpu=True).prepare(*plain[:2]), *map(prepare_data_loader, plain[2:])]
        loaders += [DataLoaderShard(range(20), batch_size=3, shuffle=True) for _ in range(2)]
        return [str(lists(loader)) for loader in loaders]

    first = orders(1)
    assert len({*first}) == 6
    assert orders(1) == first
    assert not {*first} & {*orders(2)}


def test_a_generator_of_ones_own_gives_the_order_that_it_gives_torch():
    def loader():
        return numbers(20, shuffle=True, generator=torch.Generator().manual_seed(5))

    raw, prepared = loader(), prepare(loader())
    for _ in range(3):
        assert lists(prepared) == lists(raw)


def test_the_seedable_order():
    def loader(rank=0, size=1, **config):
        return prepare(numbers(8, 2, shuffle=True), rank, size, use_seedable_sampler=True, **config)

    first = loader(data_seed=1)
    epochs = [lists(first), lists(first)]
    assert epochs[0] != epochs[1]
    again = loader(data_seed=1)
    again.set_epoch(1)
    assert lists(again) == epochs[1]
    batches = BatchSampler(RandomSampler(range(8)), 2, drop_last=False)
    raw = DataLoader(torch.arange(8), sampler=batches, batch_size=None)
    as_sampler = prepare(raw, use_seedable_sampler=True, data_seed=1)
    assert [lists(as_sampler), lists(as_sampler)] == epochs
    halves = [lists(loader(rank, 2, data_seed=1)) for rank in range(2)]
    assert list(itertools.chain(*zip(*halves, strict=True))) == epochs[0]
    set_seed(4)
    from_seed = lists(loader())
    assert from_seed == lists(loader(data_seed=4))


def test_whoever_sets_the_epoch_last_is_heard():
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0)
    prepared = prepare(numbers(8, sampler=sampler))
    for epoch in (0, 5, 3):
        sampler.set_epoch(epoch)
        expected = list(sampler)
        assert [value for batch in prepared for value in batch.tolist()] == expected


def test_an_epoch_is_over_with_its_last_batch():
    prepared = prepare(numbers(4, 2, shuffle=True), use_seedable_sampler=True, data_seed=1)
    passed = iter(prepared)
    seen = [next(passed).tolist() for _ in range(len(prepared))]
    passed = iter(prepared)  # begun before the first one is gone
    assert [next(passed).tolist() for _ in range(len(prepared))] != seen
    passed.close()
    assert prepared.iteration == 2


@pytest.mark.parametrize("num_given", [1, 2])  # after 2, the indices of the last batch are taken
def test_an_epoch_that_was_left_comes_again(num_given):
    prepared = prepare(numbers(10, 4, shuffle=True), use_seedable_sampler=True, data_seed=1)
    left = iter(prepared)
    first = [next(left).tolist() for _ in range(num_given)]
    left.close()
    assert prepared.iteration == 0
    again = lists(prepared)
    assert again[:num_given] == first
    assert prepared.iteration == 1
    assert lists(prepared) != again


def test_the_epoch_reaches_samplers_and_datasets():
    class Sampler(SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch):
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

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return int(torch.randint(1 << 60, ()))


def test_workers_of_two_ranks_draw_different_numbers():
    def draws(rank):
        own = torch.Generator().manual_seed(3)
        raw = DataLoader(Draws(), num_workers=1, generator=own)
        return prepare(raw, rank, 2, even_batches=False)

    first, second = draws(0), draws(1)
    epochs = [str(lists(first)), str(lists(second)), str(lists(first)), str(lists(draws(0)))]
    assert len(set(epochs)) == 3
    assert epochs[0] == epochs[3]


# Where a loop stands in its loader: the end, nested loops, and beginning in the middle.


# The end, and which loader is active.


def trace(loader):
    state = GradientState()
    return [(state.end_of_dataloader, state.remainder) for _ in loader]


def test_the_last_batch_is_known_to_be_the_last():
    prepared = prepare(numbers(10), 0, 2)
    assert trace(prepared) == trace(prepared) == [(False, 4), (True, 4)]
    assert prepared.end_of_dataloader
    assert trace(prepare(numbers(12), 0, 2)) == [(False, 0), (True, 0)]
    assert trace(prepare(numbers(2), 0, 2)) == [(True, 2)]
    assert trace(prepare(numbers(10, drop_last=True), 0, 2)) == [(True, 0)]
    stream = prepare(DataLoader(Stream(7), batch_size=3), 0, 2, dispatch_batches=False)
    assert trace(stream) == [(False, -1), (True, 1)]
    assert trace(prepare(numbers(0), 0, 2)) == []
    assert (active_loaders().position.end_of_dataloader, GradientState().remainder) == (False, -1)


def test_the_inner_loop_answers_while_it_runs():
    outer, inner = prepare(numbers(6)), prepare(numbers(9))
    seen = []
    for _ in outer:
        seen.append(active_loaders().position.end_of_dataloader)
        for _ in inner:
            assert active_loaders().position.loader is inner
            if active_loaders().position.end_of_dataloader:
                break  # on its last batch: the flag must not stay
        assert active_loaders().position.loader is outer
        seen.append(active_loaders().position.end_of_dataloader)
    assert seen == [False, False, True, True]


def test_samples_of_a_short_last_batch_are_counted_as_they_are():
    for loader in (numbers(10, 4), numbers(12, 4), numbers(10, 4, drop_last=True)):
        prepared = prepare(loader)
        expected = sum(map(len, prepared))
        assert prepared.progress() == (1, 0, expected)
    for dispatched in (None, True):
        for skipped, rest in ((1, 6), (3, 0), (9, 0)):
            loader = prepare(numbers(10, 4), dispatch_batches=dispatched)
            skipping = skip_first_batches(loader, skipped)
            assert sum(map(len, skipping)) == rest
            assert skipping.progress() == (1, 0, 10)


class Counting(ranks.RankContext):
    """A context that counts batches, and stops at one."""

    def __init__(self, stop_at):
        super().__init__(rank=0, local_rank=0, world_size=1, local_world_size=1)
        self.counts = []
        self.numbers = []
        self.stop_at = stop_at

    def count_batch(self, total=None, number=None):
        if len(self.counts) == self.stop_at:
            raise RunStopped("the run was stopped")
        self.counts.append(total)
        self.numbers.append(number)


def test_batches_are_counted_and_a_stop_leaves_the_loop(monkeypatch):
    be(counting := Counting(stop_at=6), monkeypatch)
    sized, unsized = prepare(numbers(12)), prepare(DataLoader(Stream(3), batch_size=3))
    list(sized), list(unsized)
    assert counting.counts == [4, 4, 4, 4, None]
    assert counting.numbers == [1, 2, 3, 4, 1]
    given = []
    with pytest.raises(RunStopped):
        given.extend(sized)
    assert lists(given) == [[0, 1, 2]]
    assert len(counting.counts) == 6
    assert not active_loaders(counting).stack


@pytest.mark.parametrize("num_given", [0, 3, 4])
def test_a_stop_keeps_the_place_for_a_checkpoint(num_given, monkeypatch):
    with monkeypatch.context() as patch:
        be(Counting(stop_at=num_given), patch)
        loader = prepare(numbers(10, 2))
        given = []
        with pytest.raises(RunStopped):
            given.extend(loader)
        state = loader.state_dict()
        assert not loader.is_iterated
    assert len(given) == num_given
    assert (state["iteration"], state["given"]) == (0, num_given)
    resumed = prepare(numbers(10, 2))
    resumed.load_state_dict(state)
    assert lists(given) + lists(resumed) == lists(numbers(10, 2))
    assert lists(loader) == lists(numbers(10, 2)), "the next pass is a whole one"
    assert (loader.state_dict()["iteration"], loader.state_dict()["given"]) == (1, 0)


@pytest.mark.parametrize(("trains", "inner_given"), [(False, 1), (True, 0)])
def test_a_stop_in_an_inner_loop_keeps_the_place_of_the_outer_one(trains, inner_given, monkeypatch):
    be(Counting(stop_at=2), monkeypatch)
    outer, inner = prepare(numbers(6, 2)), prepare(numbers(6, 2))
    with pytest.raises(RunStopped):
        _evaluate_at_each_step(outer, inner, trains)
    assert not outer.is_iterated
    states = [loader.state_dict() for loader in (outer, inner)]
    given = [(state["iteration"], state["given"]) for state in states]
    assert given == [(0, 1), (0, inner_given)], "an evaluation begins anew"


def _evaluate_at_each_step(outer, inner, trains):
    accumulation = Accumulation(GradientAccumulationPlugin())
    for _ in outer:
        if trains:
            accumulation.note_step()
        list(inner)


# Beginning in the middle.


@pytest.mark.parametrize("workers", [0, 1])
def test_skipping_batches_of_a_prepared_loader(workers):
    loader = prepare(numbers(10, num_workers=workers), 1, 2)
    skipping = skip_first_batches(loader, 1)
    assert lists(skipping) == [[9, 0, 1]]
    assert len(skipping) == 1
    assert trace(skipping) == [(True, 4)]
    assert lists(loader) == [[3, 4, 5], [9, 0, 1]]
    assert lists(skip_first_batches(skipping, 0)) == lists(loader)
    assert lists(skip_first_batches(skipping, 1)) == [[9, 0, 1]], "counted from the epoch's start"
    assert lists(skip_first_batches(loader, 5)) == []


def test_skipping_batches_with_workers_that_stay():
    loader = prepare(numbers(6, 2, num_workers=1, persistent_workers=True))
    skipping = skip_first_batches(loader, 2)
    assert lists(skipping) == lists(skipping) == [[4, 5]]
    assert lists(loader) == lists(loader) == [[0, 1], [2, 3], [4, 5]]


def test_skipping_batches_of_streams():
    raw = DataLoader(Stream(10), batch_size=2)
    assert lists(skip_first_batches(prepare(raw), 4)) == [[8, 9]]
    each = skip_first_batches(prepare(raw, 1, 2, dispatch_batches=False), 1)
    assert lists(each) == lists(each) == [[6, 7], [0, 1]]
    unprepared = skip_first_batches(DataLoader(SizedStream(10), batch_size=2), 3)
    assert lists(unprepared) == [[6, 7], [8, 9]]
    assert len(unprepared) == 2


def test_a_stream_without_its_first_batches_is_prepared_before():
    raw = skip_first_batches(DataLoader(SizedStream(12), batch_size=2), 3)
    with pytest.raises(ConfigError, match="without its first 3 batches: prepare the loader first"):
        prepare(raw)


def test_skipping_batches_of_a_loader_not_prepared():
    raw = numbers(10, 2)
    skipping = skip_first_batches(raw, 3)
    assert lists(skipping) == [[6, 7], [8, 9]]
    assert len(skipping) == 2
    assert lists(prepare(skipping, 1, 2)) == [[8, 9]]
    assert lists(skip_first_batches(skipping, 4)) == [[8, 9]]
    assert len(lists(raw)) == 5
    one_by_one = DataLoader(torch.arange(4), batch_size=None)
    assert lists(skip_first_batches(one_by_one, 3)) == [3]
    for number in (-1, 1.0, "1", None):
        with pytest.raises(
            ConfigError, match=f"num_batches={number!r}: expected a whole number, 0 "
        ):
            skip_first_batches(raw, number)


def test_a_loader_that_is_prepared_again_goes_on_in_the_same_order():
    raw = numbers(10, 2, shuffle=True)
    first = prepare(raw)
    running = iter(first)
    next(running)
    state = first.state_dict()
    rest = lists(running)
    again = prepare(raw)  # as a cell does that is run again
    again.load_state_dict(state)
    assert lists(again) == rest
    assert lists(again) == lists(first), "the epoch after it"
    assert raw.sampler.generator is None, "the user's"


@pytest.mark.parametrize("skipped", [5, 7])
def test_the_whole_epoch_that_was_complete_is_skipped(skipped):
    loader = prepare(numbers(10, 2, shuffle=True))
    list(loader)
    taken = loader.state_dict()
    following = [lists(loader), lists(loader)]
    resumed = prepare(numbers(10, 2, shuffle=True))
    resumed.load_state_dict(taken)
    assert lists(skip_first_batches(resumed, skipped)) == []
    assert [lists(resumed), lists(resumed)] == following


class OwnLoader(DataLoader[Any]):
    """A loader class of a library."""


def test_a_loader_is_pickled_in_the_middle_of_a_pass():
    loader = Accelerator(cpu=True).prepare(OwnLoader(range(12), batch_size=2, shuffle=True))
    list(loader)
    running = iter(loader)
    next(running)
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.progress() == (1, 0, 12), "the samples of the epoch that is complete"
    assert len(list(copied)) == 6
    assert len(list(running)) == 5
