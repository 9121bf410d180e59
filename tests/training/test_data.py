"""Prepared loaders: their batches, lengths and order, and where they stand in an epoch."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from notebook_accel.errors import ConfigError, RunStopped
from notebook_accel.launch import rank as ranks
from notebook_accel.training.data import (
    DataLoaderDispatcher,
    DataLoaderShard,
    active_loaders,
    prepare_data_loader,
    skip_first_batches,
)
from notebook_accel.training.data_config import DataLoaderConfiguration
from notebook_accel.training.samplers import BatchSamplerShard, IterableDatasetShard
from notebook_accel.training.seeding import set_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")


def prepare(
    loader: Any, rank: int = 0, size: int = 1, device: Any = CPU, ordinal: int = 0, **config: Any
) -> Any:
    return prepare_data_loader(
        loader,
        config=DataLoaderConfiguration(**config),
        device=device,
        num_processes=size,
        process_index=rank,
        ordinal=ordinal,
    )


def numbers(count: int, size: int | None = 3, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(count), batch_size=size, **options)  # type: ignore[arg-type]


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


class Stream(IterableDataset):
    """Counts up; knows its length where it is told to."""

    epoch = -1

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


@pytest.fixture(autouse=True)
def _nothing_active() -> Iterator[None]:
    active_loaders().clear()
    yield
    assert not active_loaders().in_dataloader, "a pass was left behind"


# What comes out.


@pytest.mark.parametrize("workers", [0, 2])
def test_one_rank_gets_what_the_loader_gives(workers: int) -> None:
    raw = numbers(10, num_workers=workers)
    prepared = prepare(raw)
    assert isinstance(prepared, DataLoaderShard)
    assert isinstance(prepared, DataLoader)
    assert lists(prepared) == lists(raw)
    assert len(prepared) == 4
    assert prepare(prepared) is prepared


@pytest.mark.parametrize("workers", [0, 1])
def test_each_rank_gets_its_batches(workers: int) -> None:
    loaders = [prepare(numbers(10, num_workers=workers), rank, 2) for rank in range(2)]
    assert lists(loaders[0]) == [[0, 1, 2], [6, 7, 8]]
    assert lists(loaders[1]) == [[3, 4, 5], [9, 0, 1]]
    assert [len(loader) for loader in loaders] == [2, 2]
    assert isinstance(loaders[0].batch_sampler, BatchSamplerShard)
    assert loaders[0].total_batch_size == 6
    assert loaders[0].total_dataset_length == 10


def test_divided_batches() -> None:
    loaders = [prepare(numbers(10, 4), rank, 2, split_batches=True) for rank in range(2)]
    assert [lists(loader) for loader in loaders] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]
    assert loaders[0].total_batch_size == 4


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
def test_streams_that_each_rank_reads(
    config: dict[str, Any], count: int, size: int | None, expected: Any
) -> None:
    for rank in range(2):
        raw = DataLoader(SizedStream(count), batch_size=size)
        prepared = prepare(raw, rank, 2, dispatch_batches=False, **config)
        assert isinstance(prepared, DataLoaderShard)
        assert isinstance(prepared.dataset, IterableDatasetShard)
        batches = list(prepared)
        assert [b.tolist() if isinstance(b, torch.Tensor) else b for b in batches] == expected[rank]
        assert len(prepared) == len(expected[rank])


def test_a_stream_drops_its_last_round() -> None:
    raw = DataLoader(Stream(10), batch_size=2, drop_last=True)
    assert lists(prepare(raw, 0, 2, dispatch_batches=False)) == [[0, 1], [4, 5]]


class Sharded(Stream):
    """As an iterable dataset of Hugging Face's, which divides itself."""

    num_shards = 4

    def __init__(self, count: int, step: int = 1, start: int = 0) -> None:
        super().__init__(count)
        self.step, self.start = step, start

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.start, self.count, self.step))

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.count, num_shards, index)


def test_a_stream_that_divides_itself_does() -> None:
    raw = DataLoader(Sharded(6), batch_size=2)
    assert lists(prepare(raw, 1, 2, dispatch_batches=False)) == [[1, 3], [5]]
    assert lists(prepare(raw, 1, 2, dispatch_batches=False, split_batches=True)) == [[1], [3], [5]]


def test_streams_are_dispatched_where_batches_are_placed() -> None:
    raw = DataLoader(Stream(4), batch_size=2)
    assert isinstance(prepare(raw), DataLoaderDispatcher)
    assert lists(prepare(raw)) == [[0, 1], [2, 3]]
    assert isinstance(prepare(raw, device=None), DataLoaderShard)
    assert isinstance(prepare(raw, dispatch_batches=False), DataLoaderShard)
    assert isinstance(prepare(numbers(4), dispatch_batches=True), DataLoaderDispatcher)


def test_a_sampler_that_gives_batches() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    raw = DataLoader(torch.arange(10), sampler=batches, batch_size=None)  # type: ignore[arg-type]
    assert lists(prepare(raw, 1, 2)) == [[3, 4, 5], [9, 0, 1]]


def test_batches_of_ones_own() -> None:
    raw = DataLoader(range(6), batch_sampler=[[0], [1, 2], [3, 4, 5]])  # type: ignore[arg-type]
    assert [lists(prepare(raw, rank, 2)) for rank in range(2)] == [
        [[0], [3, 4, 5]],
        [[1, 2], [0]],
    ]


def test_a_loader_that_shares_out_itself_is_left_alone() -> None:
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    raw = numbers(8, 2, sampler=sampler)
    with pytest.warns(UserWarning, match="DistributedSampler"):
        prepared = prepare(raw, 1, 2)
    assert lists(prepared) == [[1, 3], [5, 7]]


# What is kept of the user's loader.


@dataclass
class Own:
    """A batch of a class of one's own."""

    values: list[int]


class Moving(Own):
    moved_to: Any = None

    def to(self, device: Any) -> Moving:
        self.moved_to = device
        return self


def own_init(worker: int) -> None:
    torch.manual_seed(1000 + worker)


class MyLoader(DataLoader):  # type: ignore[type-arg]
    """A loader of one's own, which changes its batches."""

    label = "mine"

    def __iter__(self) -> Any:
        return (batch + 100 for batch in super().__iter__())


def test_everything_else_is_the_users() -> None:
    raw = MyLoader(
        range(8),
        batch_size=2,
        num_workers=1,
        worker_init_fn=own_init,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=20,
        pin_memory_device="",
    )
    prepared = prepare(raw, 1, 2)
    assert isinstance(prepared, DataLoaderShard)
    assert isinstance(prepared, MyLoader)
    assert prepared.label == "mine"
    for name in (
        "num_workers",
        "worker_init_fn",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
    ):
        assert getattr(prepared, name) == getattr(raw, name)
    assert lists(prepared) == lists(prepared) == [[102, 103], [106, 107]]
    assert prepared._iterator is not None, "the workers were not kept"
    assert raw._iterator is None
    assert lists(raw) == [[100, 101], [102, 103], [104, 105], [106, 107]]


def test_batches_are_put_on_the_device() -> None:
    def collate(samples: list[int]) -> Any:
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
    halves = [lists(loader(rank, 2, data_seed=1)) for rank in range(2)]
    assert list(itertools.chain(*zip(*halves, strict=True))) == epochs[0]
    set_seed(4)
    from_seed = lists(loader())
    assert from_seed == lists(loader(data_seed=4))


def test_an_epoch_that_was_left_comes_again() -> None:
    prepared = prepare(numbers(8, 2, shuffle=True), use_seedable_sampler=True, data_seed=1)
    first = next(iter(prepared)).tolist()
    assert prepared.iteration == 0
    assert lists(prepared)[0] == first
    assert prepared.iteration == 1


def test_the_epoch_reaches_samplers_and_datasets() -> None:
    class Sampler(SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    prepared = prepare(numbers(4, sampler=Sampler(range(4))), 0, 2)
    list(prepared), list(prepared)
    prepared.set_epoch(7)
    assert Sampler.epochs == [0, 1, 7]
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


# The end, and which loader is active.


def trace(loader: Any) -> list[tuple[bool, int]]:
    active = active_loaders()
    return [(active.end_of_dataloader, active.remainder) for _ in loader]


def test_the_last_batch_is_known_to_be_the_last() -> None:
    prepared = prepare(numbers(10), 0, 2)
    assert trace(prepared) == trace(prepared) == [(False, 4), (True, 4)]
    assert prepared.end_of_dataloader
    assert trace(prepare(numbers(12), 0, 2)) == [(False, 0), (True, 0)]
    assert trace(prepare(numbers(2), 0, 2)) == [(True, 2)]
    assert trace(prepare(numbers(10, drop_last=True), 0, 2)) == [(True, 0)]
    stream = prepare(DataLoader(Stream(7), batch_size=3), 0, 2, dispatch_batches=False)
    assert trace(stream) == [(False, -1), (True, 1)]
    assert trace(prepare(numbers(0), 0, 2)) == []
    assert (active_loaders().end_of_dataloader, active_loaders().remainder) == (False, -1)


def test_the_inner_loop_answers_while_it_runs() -> None:
    outer, inner = prepare(numbers(6)), prepare(numbers(9))
    seen = []
    for _ in outer:
        seen.append(active_loaders().end_of_dataloader)
        for _ in inner:
            assert active_loaders().active_dataloader is inner
            if active_loaders().end_of_dataloader:
                break  # on its last batch: the flag must not stay
        assert active_loaders().active_dataloader is outer
        seen.append(active_loaders().end_of_dataloader)
    assert seen == [False, False, True, True]


def _raise_within(loader: Any) -> None:
    for batch in loader:
        raise KeyError(batch)


def test_an_inner_loop_that_raises_is_forgotten() -> None:
    outer, inner = prepare(numbers(6)), prepare(numbers(3))
    for _ in outer:
        with pytest.raises(KeyError):
            _raise_within(inner)
        assert active_loaders().active_dataloader is outer


def test_iterators_that_are_kept_do_not_answer_for_others() -> None:
    train, other = prepare(numbers(6)), prepare(numbers(3))
    left = iter(other)
    next(left)  # its last batch, and it is still referenced
    assert active_loaders().end_of_dataloader
    assert trace(train) == [(False, -1), (True, 0)]
    next(iter(other))
    left.close()
    assert not active_loaders().in_dataloader


def test_two_iterators_of_one_loader() -> None:
    loader = prepare(numbers(6))
    first, second = iter(loader), iter(loader)
    next(first), next(first)
    assert active_loaders().end_of_dataloader
    next(second)
    assert not active_loaders().end_of_dataloader
    assert list(first) == []
    assert active_loaders().in_dataloader, "the other pass is still under way"
    assert next(second).tolist() == [3, 4, 5]
    assert active_loaders().end_of_dataloader
    second.close()


def test_a_dataset_that_raises_ends_the_pass() -> None:
    class Broken:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise OSError("unreadable")
            return index

    with pytest.raises(OSError, match="unreadable"):
        list(prepare(DataLoader(Broken(), batch_size=2)))  # type: ignore[arg-type]
    assert not active_loaders().in_dataloader


def test_a_loader_nobody_holds_is_freed_without_the_collector() -> None:
    import weakref

    gc.disable()
    try:
        prepared = prepare(numbers(6), 0, 2)
        list(prepared)
        next(iter(prepared))
        known = weakref.ref(prepared)
        del prepared
        assert known() is None
    finally:
        gc.enable()


class Counting(ranks.RankContext):
    """A context that counts batches, and stops at one."""

    def __init__(self, stop_at: int) -> None:
        super().__init__(rank=0, local_rank=0, world_size=1, local_world_size=1)
        self.counts: list[int | None] = []
        self.stop_at = stop_at

    def count_batch(self, total: int | None = None) -> None:
        if len(self.counts) == self.stop_at:
            raise RunStopped("the run was stopped")
        self.counts.append(total)


def test_batches_are_counted_and_a_stop_leaves_the_loop() -> None:
    before = ranks.current()
    counting = Counting(stop_at=6)
    ranks.enter(counting)
    try:
        sized, unsized = prepare(numbers(12)), prepare(DataLoader(Stream(3), batch_size=3))
        list(sized), list(unsized)
        assert counting.counts == [4, 4, 4, 4, None]
        given = []
        with pytest.raises(RunStopped):
            given.extend(sized)
        assert lists(given) == [[0, 1, 2]]
        assert len(counting.counts) == 6
        assert not active_loaders(counting).in_dataloader
    finally:
        ranks.enter(before)


# Beginning in the middle.


@pytest.mark.parametrize("workers", [0, 1])
def test_skipping_batches_of_a_prepared_loader(workers: int) -> None:
    loader = prepare(numbers(10, num_workers=workers), 1, 2)
    skipping = skip_first_batches(loader, 1)
    assert lists(skipping) == [[9, 0, 1]]
    assert len(skipping) == 1
    assert trace(skipping) == [(True, 4)]
    assert lists(loader) == [[3, 4, 5], [9, 0, 1]]
    assert lists(skip_first_batches(skipping, 0)) == lists(loader)
    assert lists(skip_first_batches(skipping, 1)) == [[9, 0, 1]], "counted from the epoch's start"
    assert lists(skip_first_batches(loader, 5)) == []


def test_skipping_batches_with_workers_that_stay() -> None:
    loader = prepare(numbers(6, 2, num_workers=1, persistent_workers=True))
    skipping = skip_first_batches(loader, 2)
    assert lists(skipping) == lists(skipping) == [[4, 5]]
    assert lists(loader) == lists(loader) == [[0, 1], [2, 3], [4, 5]]


def test_skipping_batches_of_streams() -> None:
    raw = DataLoader(Stream(10), batch_size=2)
    assert lists(skip_first_batches(prepare(raw), 4)) == [[8, 9]]
    each = skip_first_batches(prepare(raw, 1, 2, dispatch_batches=False), 1)
    assert lists(each) == lists(each) == [[6, 7], [0, 1]]
    unprepared = skip_first_batches(DataLoader(SizedStream(10), batch_size=2), 3)
    assert lists(unprepared) == [[6, 7], [8, 9]]
    assert len(unprepared) == 2


def test_skipping_batches_of_a_loader_not_prepared() -> None:
    raw = numbers(10, 2)
    skipping = skip_first_batches(raw, 3)
    assert lists(skipping) == [[6, 7], [8, 9]]
    assert len(skipping) == 2
    assert lists(prepare(skipping, 1, 2)) == [[8, 9]]
    assert lists(skip_first_batches(skipping, 4)) == [[8, 9]]
    assert len(lists(raw)) == 5
    one_by_one = DataLoader(torch.arange(4), batch_size=None)  # type: ignore[arg-type]
    assert lists(skip_first_batches(one_by_one, 3)) == [3]


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_restored_loader_gives_the_rest_of_its_epoch(given: int, seedable: bool) -> None:
    def loader(seed: int) -> Any:
        set_seed(seed)
        return prepare(numbers(10, 2, shuffle=True), use_seedable_sampler=seedable, data_seed=1)

    first = loader(1)
    list(first)
    taken = first.state_dict()
    rest = []
    for count, batch in enumerate(first):
        if count >= given:
            rest.append(batch.tolist())
        if count + 1 == given:
            taken = first.state_dict()
    following = lists(first)
    second = loader(2)
    list(second), list(second)
    second.load_state_dict(taken)
    assert lists(second) == rest
    assert lists(second) == following, "the epoch after it differs"
    third = loader(3)
    third.load_state_dict(taken)
    assert lists(skip_first_batches(third, 4)) == rest[4 - given :], "not absolute"
    assert lists(third) == following


# What makes no sense.


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch of 3 over 2 processes.*multiple of 2"):
        prepare(numbers(6), 0, 2, split_batches=True)
    with pytest.raises(ConfigError, match=r"dispatch_batches=True.*device_placement=False"):
        prepare(numbers(6), device=None, dispatch_batches=True)
    with pytest.raises(ConfigError, match="even_batches=2: expected bool"):
        DataLoaderConfiguration(even_batches=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="data_seed='x': expected int"):
        DataLoaderConfiguration(data_seed="x")  # type: ignore[arg-type]
