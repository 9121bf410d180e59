"""Each sample counted once: gather_for_metrics over every kind of loader, on real ranks."""

import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from notebook_accel import Accelerator, DataLoaderConfiguration, PartialState
from notebook_accel.errors import ConfigError
from notebook_accel.training.collectives import gather_object, num_ranks, this_rank
from notebook_accel.training.data.dispatch import DataLoaderDispatcher
from notebook_accel.training.data.gathering import gather_for_metrics
from notebook_accel.training.data.loader_wrapper import skip_first_batches
from notebook_accel.training.processes.random_numbers import set_seed
from notebook_accel.training.stepping.accumulation import GradientState
from notebook_accel.training.stepping.active_loaders import active_loaders
from tests.training import loading
from tests.training.harness import on_ranks
from tests.training.loading import Sharded, SizedStream, Stream, lists, numbers


def prepare(loader, **settings):
    return loading.prepare(loader, this_rank(), num_ranks(), **settings)


def seen(loader):
    """What all ranks have seen, by ``gather_for_metrics`` of each batch."""
    return [value for batch in loader for value in gather_for_metrics(batch).tolist()]


def weighed(loader, count):
    """How many rows all ranks gather of losses that are repeated to the loader's batch size, as
    Transformers' Trainer does, and how many those should be: as many for each sample."""
    if num_ranks() == 1 and isinstance(loader.dataset, IterableDataset):
        return 0, 0  # nobody says how many samples its last batch has
    size = loader.given_batch_size
    rows = sum(len(gather_for_metrics(torch.tensor(0.5).repeat(size))) for _ in loader)
    return rows, count * size * num_ranks() // loader.total_batch_size


class OfWorker(Stream):
    """Each worker of a loader reads a part."""

    def __iter__(self):
        worker = get_worker_info()
        assert worker is not None
        return iter(range(worker.id, self.count, worker.num_workers))


READ_BY_ALL = {"dispatch_batches": False}
DISPATCHED = {"dispatch_batches": True}
SPLIT, UNEVEN = {"split_batches": True}, {"even_batches": False}


def of_stream(count, size=3):
    return DataLoader(Stream(count), batch_size=size)


def even_cases(n):
    """By kind, a loader for ``n`` ranks, how it is prepared, and how many samples it has."""
    sizes = [(7, 3), (8, 3), (9, 3), (10, 3), (12, 3), (2, 3), (1, 4), (5, 1)]
    workers = DataLoader(SizedStream(10), batch_size=3, num_workers=1)
    uneven = of_stream(4 * n + 1, 2 * n)
    return {
        **{f"n={count} b={size}": (numbers(count, size), {}, count) for count, size in sizes},
        "workers": (numbers(10, num_workers=1), {}, 10),
        "split": (numbers(10, 6), SPLIT, 10),
        "stream": (of_stream(10), READ_BY_ALL, 10),
        "stream, workers": (workers, READ_BY_ALL, 10),
        "stream, split": (of_stream(10, 6), READ_BY_ALL | SPLIT, 10),
        "dispatched": (of_stream(10), {}, 10),
        "dispatched, split": (numbers(9, 6), DISPATCHED | SPLIT, 9),
        "tiny, dispatched": (of_stream(1), {}, 1),
        "not filled up": (numbers(6 * n - 2), UNEVEN, 6 * n - 2),
        "stream, not filled up": (of_stream(6 * n - 2), READ_BY_ALL | UNEVEN, 6 * n - 2),
        "dispatched, not filled up": (of_stream(4 * n + 1), UNEVEN, 4 * n + 1),
        "dispatched, split, not filled up": (uneven, SPLIT | UNEVEN, 4 * n + 1),
    }


def uneven_cases(n):
    """Ranks have batches of different sizes at the same step. All have as many batches: a rank
    without one would gather nothing, and the others wait for it."""
    # A round of batches of different sizes, and one of batches of one size.
    samples = itertools.count()
    own = [[*itertools.islice(samples, rows)] for rows in [*range(1, n + 1), *[2] * n]]
    dispatched = DataLoader(range(100), batch_sampler=own)
    by_workers = DataLoader(OfWorker(10), batch_size=2, num_workers=2)
    itself = DataLoader(Sharded(n * 3 - 1), batch_size=3)
    one_by_one = DataLoader(torch.arange(5).reshape(5, 1), batch_size=None)
    return {
        "batches of one's own": (DataLoader(range(6), batch_sampler=loading.LISTS), {}, 6),
        "those, dispatched": (dispatched, DISPATCHED, sum(map(len, own))),
        "samples, not batches": (one_by_one, {}, 5),
        "divided by workers, each with a last round": (by_workers, READ_BY_ALL, 10),
        "divides itself": (itself, READ_BY_ALL, n * 3 - 1),
    }


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks("size")
def test_each_sample_counts_once(size):
    for name, (raw, settings, count) in even_cases(size).items():
        loader = prepare(raw, **settings)
        assert seen(loader) == list(range(count)), name
        rows, expected = weighed(loader, count)
        assert rows == expected, name
    for name, (raw, settings, count) in uneven_cases(size).items():
        assert sorted(seen(prepare(raw, **settings))) == list(range(count)), name


class Result(dict):
    """As a model's output."""


@on_ranks(2)
def test_structures():
    rank = this_rank()
    assert gather_for_metrics(torch.tensor([rank])).tolist() == [0, 1]
    loader = prepare(numbers(7))
    for batch in loader:  # the last: [6, 0, 1] and [2, 3, 4], of which 6 alone is real
        if not active_loaders().position.end_of_dataloader:
            continue
        words = [f"w{value}" for value in batch.tolist()]
        assert gather_for_metrics(batch.float().mean()).tolist() == pytest.approx([7 / 3, 3])
        losses = gather_for_metrics({"loss": torch.tensor(float(rank)), "x": batch})
        assert (losses["loss"].tolist(), losses["x"].tolist()) == ([0, 1], [6])
        rows, listed = gather_for_metrics((batch.reshape(3, 1), [batch]))
        assert (rows.tolist(), listed[0].tolist()) == ([[6]], [6])
        assert gather_for_metrics(torch.zeros(5)).shape == (10,)
        assert gather_for_metrics(words) == gather_for_metrics(tuple(words)) == ["w6"]
        assert gather_for_metrics("one") == ["one", "one"]
        both = gather_for_metrics(Result(x=batch, words=words))
        assert type(both) is Result
        assert (both["x"].tolist(), both["words"]) == ([6], ["w6"])
        values, texts = gather_for_metrics((batch, words))
        assert (values.tolist(), texts) == ([6], ["w6"])
        assert gather_for_metrics([{"id": word} for word in words]) == [{"id": "w6"}]
        (box,) = gather_for_metrics([{"box": torch.zeros(n + 1), "id": n} for n in batch.tolist()])
        assert (box["id"], box["box"].shape) == (6, (7,))
        asked = gather_for_metrics(list(batch), use_gather_object=True)
        assert [each.tolist() for each in asked] == [6]
        assert gather_for_metrics([1, 2]) == [1, 2, 1, 2], "of another length"
    assert gather_for_metrics(batch).tolist() == [6, 0, 1, 2, 3, 4], "cut outside of the loop"


@on_ranks(2)
def test_a_rank_may_have_nothing():
    """Rank 1 has found nothing in its images."""
    words = [] if this_rank() else ["a"]
    x = torch.tensor([this_rank()])
    assert gather_for_metrics(words) == ["a"]
    assert gather_for_metrics(words, use_gather_object=True) == ["a"]
    named = gather_for_metrics({"x": x, "words": words, "none": {}})
    assert named["x"].tolist() == [0, 1]
    assert (named["words"], named["none"]) == (["a"], {})
    first, second = gather_for_metrics((x, words))
    assert (first.tolist(), second) == ([0, 1], ["a"])
    deep = gather_for_metrics({"x": (x, {"words": words})})
    assert deep["x"][1] == {"words": ["a"]}
    assert gather_for_metrics((x, (), []))[1:] == ((), []), "nobody has any"
    first, second = gather_for_metrics([x, []])
    assert (first.tolist(), second) == ([0, 1], [])


@on_ranks(2)
def test_odd_loops():
    loader, other = prepare(numbers(10)), prepare(numbers(7))
    assert seen(skip_first_batches(loader, 1)) == [6, 7, 8, 9]
    left = iter(other)
    next(left), next(left)  # at its end, and never closed
    assert seen(loader) == list(range(10))
    nested = []
    for batch in loader:
        for _ in other:
            break
        nested += gather_for_metrics(batch).tolist()
    assert nested == list(range(10))
    taken = skip_first_batches(prepare(DataLoader(Stream(10), batch_size=3)), 1)
    assert seen(taken) == [6, 7, 8, 9]
    gather_for_metrics([open])  # a builtin travels by name
    with pytest.raises((pickle.PicklingError, AttributeError)):
        gather_for_metrics([lambda: 0])


def orders():
    """Of shuffled, seedable, weighted loaders, and of one whose generators differ by rank."""
    set_seed(1, device_specific=True)
    default = prepare(numbers(8, 2, shuffle=True))
    seedable = prepare(numbers(8, 2, shuffle=True), use_seedable_sampler=True)
    sampler = WeightedRandomSampler([1.0] * 8, 8, replacement=False)
    weighted = prepare(DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, False)))
    own = numbers(8, 2, shuffle=True, generator=torch.Generator().manual_seed(this_rank()))
    loaders = [default, default, seedable, seedable, weighted]
    loaders += [prepare(own, use_seedable_sampler=True)]
    found = [[*itertools.chain(*lists(loader))] for loader in loaders]
    if this_rank():
        torch.rand(())  # ranks that drew differently still agree
    return [*found, [*itertools.chain(*lists(prepare(numbers(8, 2, shuffle=True))))]]


@on_ranks(2)
def test_ranks_agree_on_the_order():
    found = orders()
    assert orders() == found, "two trainings with one seed differ"
    for mine in found:
        assert sorted(gather_object(mine)) == list(range(8))
    assert found[0] != found[1]
    assert found[2] != found[3]


# Loaders that rank 0 reads.


class Reads(Stream):
    """Says which rank reads it."""

    def __iter__(self):
        assert this_rank() == 0
        return super().__iter__()


class Widening(IterableDataset):
    """Batches of their own widths, as padding to the longest of a batch makes them."""

    def __iter__(self):
        for width in (1, 2, 3, 4, 5):
            yield {"x": torch.full((2, width), width), "text": [f"t{width}"] * 2, "n": width}


class Failing(Stream):
    def __iter__(self):
        yield from range(3)
        raise OSError("unreadable")


def with_text(samples):
    return [torch.tensor(samples), tuple(f"t{sample}" for sample in samples), {"n": len(samples)}]


def buckets():
    own = [[0, 1], [2, 3], [4]]
    return DataLoader(range(5), batch_sampler=own)


def padded_to_longest(samples):
    """Batches whose width is that of their longest sample, and whose last one is short."""
    width = max(samples)
    return torch.tensor([[sample] * width for sample in samples])


def own_slice(batch, rows, *, process_index, num_processes):
    """Each rank gets its rows, and the whole of what has none."""
    return {"rows": batch["rows"][rows], "all": batch["rows"], "rank": process_index}


def as_dict(samples):
    return {"rows": torch.tensor(samples)}


def given_by(loader):
    assert isinstance(loader, DataLoaderDispatcher)
    given = lists(loader)
    assert len(loader) == len(given)
    return given


def stream(count, size=3, **options):
    kind = SizedStream if this_rank() else type("Read", (Reads, SizedStream), {})
    return DataLoader(kind(count), batch_size=size, **options)


@on_ranks(2)
def test_rank_0_reads_for_all():
    rank = this_rank()
    golden = ([[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]])[rank]
    filled_up = ([[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 0]])[rank]
    twice = prepare(stream(10))
    assert given_by(twice) == given_by(twice) == golden
    assert given_by(prepare(numbers(10), dispatch_batches=True)) == golden
    split = prepare(stream(9, 4), split_batches=True)
    assert given_by(split) == ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [0]])[rank]
    assert given_by(prepare(stream(9))) == filled_up
    assert given_by(prepare(stream(9), even_batches=False)) == filled_up
    assert given_by(prepare(stream(10, drop_last=True))) == [[[0, 1, 2]], [[3, 4, 5]]][rank]
    batches = BatchSampler(range(12), 4, drop_last=True)
    dropping = prepare(DataLoader(range(12), batch_sampler=batches), dispatch_batches=True)
    assert given_by(dropping) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]][rank]
    shuffled = given_by(prepare(numbers(12, 3, shuffle=True), dispatch_batches=True))
    assert sorted(gather_object([*itertools.chain(*shuffled)])) == list(range(12))
    own = prepare(buckets(), dispatch_batches=True)
    assert given_by(own) == [[[0, 1], [4]], [[2, 3], [0, 1]]][rank]
    divided = prepare(buckets(), dispatch_batches=True, split_batches=True)
    assert given_by(divided) == [[[0], [2], [4]], [[1], [3], [4]]][rank]
    ragged = DataLoader(range(1, 8), batch_size=4, collate_fn=padded_to_longest)
    first, last = given_by(prepare(ragged, dispatch_batches=True, split_batches=True))
    assert first[0] == [[1] * 4, [3] * 4][rank]
    assert last == [[[5] * 7, [6] * 7], [[7] * 7, [5] * 7]][rank]
    mesh = SimpleNamespace(mesh=torch.arange(2)[None], mesh_dim_names=("dp_shard", "tp"))
    PartialState(cpu=True)
    of_one_share = DataLoaderDispatcher(range(5), torch_device_mesh=mesh, batch_size=2)
    assert given_by(of_one_share) == [[0, 1], [2, 3], [4]]
    active = GradientState()
    ends = [(active.end_of_dataloader, active.remainder) for _ in prepare(stream(10))]
    assert ends == [(False, -1), (True, 4)]


@on_ranks(2)
def test_a_function_of_the_users_slices_dispatched_batches():
    config = DataLoaderConfiguration(dispatch_batches=True)
    prepared = Accelerator(cpu=True, dataloader_config=config).prepare_data_loader(
        numbers(7, 2, collate_fn=as_dict), slice_fn_for_dispatch=own_slice
    )
    by_hand = DataLoaderDispatcher(
        range(7), slice_fn=own_slice, batch_size=2, collate_fn=as_dict, iteration=3
    )
    rank = this_rank()
    first, second = [[[0, 1], [4, 5]], [[2, 3], [6, 0]]][rank]
    for loader in (prepared, by_hand):
        batches = list(loader)
        assert [batch["rows"].tolist() for batch in batches] == [first, second]
        assert [batch["all"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 0]]
        assert [batch["rank"] for batch in batches] == [rank, rank]
    assert by_hand.iteration == 4


@on_ranks(2)
def test_what_rank_0_cannot_read_is_raised_on_every_rank():
    told = "could not read the next batch: OSError: unreadable" if this_rank() else "^unreadable"
    with pytest.raises(Exception, match=told):
        list(prepare(DataLoader(Failing(9), batch_size=2)))
    with pytest.raises(Exception, match="has no rows to divide"):
        list(prepare(DataLoader(Widening(), batch_size=None, collate_fn=str), split_batches=True))


@on_ranks(2)
def test_batches_of_any_form_are_dispatched():
    rank = this_rank()
    mixed = prepare(numbers(10, collate_fn=with_text), dispatch_batches=True)
    values, texts, counts = list(mixed)[1]
    assert (values.tolist(), texts) == [([6, 7], ("t6", "t7")), ([8, 9], ("t8", "t9"))][rank]
    assert counts["n"] in (1, 3)
    widths = list(prepare(DataLoader(Widening(), batch_size=None)))
    assert [batch["x"].shape[1] for batch in widths] == [[1, 3, 5], [2, 4, 5]][rank]
    if rank:
        assert [batch["text"] for batch in widths] == [["t2"] * 2, ["t4"] * 2, ["t5"]]
        assert [batch["n"] for batch in widths[:2]] == [2, 4]


# Loaders whose last round has nothing for some ranks.


def steps_and_samples(loader, num_common):
    """A loop whose first ``num_common`` steps all ranks gather; how many samples it says."""
    given = []
    for number, batch in enumerate(loader):
        if number < num_common:
            assert gather_object([number]) == [number] * num_ranks(), "ranks at different steps"
            of_all = {*gather_object(batch.tolist())}  # a rank may repeat rank 0's sample
            assert gather_for_metrics(batch).tolist() == sorted(of_all)
        given.append(batch.tolist())
    return given, loader.progress()[2]


@on_ranks(2)
def test_ranks_make_the_same_steps_until_one_has_no_more():
    uneven = prepare(numbers(9), even_batches=False)
    own = [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5]]][this_rank()]
    assert steps_and_samples(uneven, 1) == (own, 9)
    assert steps_and_samples(prepare(numbers(10), dispatch_batches=True), 2)[1] == 10
    resumed = prepare(numbers(5, 2), even_batches=False)
    resumed.load_state_dict(resumed.state_dict())
    rest = list(skip_first_batches(resumed, 1))  # all that rank 1 has, and half of rank 0's
    assert (len(rest), resumed.iteration) == (1 - this_rank(), 1), "in the same epoch"


def test_rows_of_one_sample_stay_together():
    """Of each sample the collate function makes two rows, all first ones before the second ones."""

    def rows(*samples):
        return [*samples, *(100 + sample for sample in samples)]

    def divide(batches, has_first=False, **config):
        raw = DataLoader(SizedStream(11), batch_size=4)
        loader = loading.prepare(raw, 0, 2, dispatch_batches=True, **config)
        rounds = loader._rounds(iter([torch.tensor(batch) for batch in batches]), has_first)
        return [[part.batch.tolist() for part in each] for each in rounds]

    batches = [rows(0, 1, 2, 3), rows(4, 5, 6, 7), rows(8, 9, 10)]
    assert divide(batches) == [batches[:2], [batches[2], batches[0]]]
    resumed = divide([batches[0], batches[2]], has_first=True)
    assert resumed == [[batches[2], batches[0]]]
    with pytest.raises(ConfigError, match=r"split_batches=True .* 8 rows for batch_size=4"):
        divide(batches, split_batches=True)
