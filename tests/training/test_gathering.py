"""Each sample counted once: gather_for_metrics over every kind of loader, on real ranks."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from notebook_accel import PartialState
from notebook_accel.errors import ConfigError
from notebook_accel.training.collectives import gather_object, num_ranks, this_rank
from notebook_accel.training.data.dispatch import DataLoaderDispatcher
from notebook_accel.training.data.gathering import gather_for_metrics
from notebook_accel.training.data.loader_wrapper import skip_first_batches
from notebook_accel.training.processes.random_numbers import set_seed
from notebook_accel.training.stepping.accumulation import GradientState
from notebook_accel.training.stepping.active_loaders import active_loaders
from tests.training import loading
from tests.training.harness import run_ranks
from tests.training.loading import Sharded, SizedStream, Stream, numbers


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


# What each kind of loader gives, as a table that one start of processes goes through.

CASES = {
    **{f"n={n} b={b}": lambda n=n, b=b: (prepare(numbers(n, b)), n)
       for n, b in [(7, 3), (8, 3), (9, 3), (10, 3), (12, 3), (2, 3), (1, 4), (5, 1)]},
    "workers": lambda: (prepare(numbers(10, num_workers=1)), 10),
    "split": lambda: (prepare(numbers(10, 6), split_batches=True), 10),
    "stream": lambda: (prepare(DataLoader(Stream(10), batch_size=3), dispatch_batches=False), 10),
    "stream, workers": lambda: (
        prepare(DataLoader(SizedStream(10), batch_size=3, num_workers=1), dispatch_batches=False),
        10,
    ),
    "stream, split": lambda: (
        prepare(DataLoader(Stream(10), batch_size=6), dispatch_batches=False, split_batches=True),
        10,
    ),
    "dispatched": lambda: (prepare(DataLoader(Stream(10), batch_size=3)), 10),
    "dispatched, split": lambda: (
        prepare(numbers(9, 6), dispatch_batches=True, split_batches=True), 9,
    ),
    "tiny, dispatched": lambda: (prepare(DataLoader(Stream(1), batch_size=3)), 1),
    "even_batches=False": lambda: (
        prepare(numbers(num_ranks() * 6 - 2), even_batches=False), num_ranks() * 6 - 2,
    ),
    "stream, even_batches=False": lambda: (
        prepare(
            DataLoader(Stream(num_ranks() * 6 - 2), batch_size=3),
            dispatch_batches=False,
            even_batches=False,
        ),
        num_ranks() * 6 - 2,
    ),
    "dispatched, even_batches=False": lambda: (
        prepare(DataLoader(Stream(num_ranks() * 4 + 1), batch_size=3), even_batches=False),
        num_ranks() * 4 + 1,
    ),
    "dispatched, split, even_batches=False": lambda: (
        prepare(
            DataLoader(Stream(num_ranks() * 4 + 1), batch_size=num_ranks() * 2),
            split_batches=True,
            even_batches=False,
        ),
        num_ranks() * 4 + 1,
    ),
}  # fmt: skip


def uneven_first(size):
    """A round of batches of different sizes, and one of batches of one size."""
    samples = itertools.count()
    return [[*itertools.islice(samples, rows)] for rows in [*range(1, size + 1), *[2] * size]]


# In these, ranks have batches of different sizes at the same step. All have as many batches: a
# rank without one would gather nothing, and the others wait for it.
UNEVEN = {
    "batches of one's own": lambda: prepare(
        DataLoader(range(6), batch_sampler=[[0], [1, 2], [3, 4, 5]])
    ),
    "batches of one's own, dispatched": lambda: prepare(
        DataLoader(range(100), batch_sampler=uneven_first(num_ranks())), dispatch_batches=True
    ),
    "samples, not batches": lambda: prepare(
        DataLoader(torch.arange(5).reshape(5, 1), batch_size=None)
    ),
    "divided by workers, each with a last round": lambda: prepare(
        DataLoader(OfWorker(10), batch_size=2, num_workers=2), dispatch_batches=False
    ),
    "divides itself": lambda: prepare(
        DataLoader(Sharded(num_ranks() * 3 - 1), batch_size=3), dispatch_batches=False
    ),
}


def counts_of_uneven(size):
    return {
        "batches of one's own": 6,
        "batches of one's own, dispatched": size * (size + 1) // 2 + 2 * size,
        "samples, not batches": 5,
        "divided by workers, each with a last round": 10,
        "divides itself": size * 3 - 1,
    }


def gathers_even():
    return {
        name: (seen(loader), count, weighed(loader, count)) for name, (loader, count) in made(CASES)
    }


def gathers_uneven():
    return {name: seen(loader) for name, loader in made(UNEVEN)}


def made(cases):
    return ((name, make()) for name, make in cases.items())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_sample_counts_once(size):
    for results in run_ranks(gathers_even, size):
        assert results.keys() == CASES.keys()
        for name, (values, count, (rows, expected)) in results.items():
            assert values == list(range(count)), name
            assert rows == expected, name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_sample_counts_once_where_ranks_have_more_or_fewer(size):
    for results in run_ranks(gathers_uneven, size):
        assert results.keys() == UNEVEN.keys()
        for name, count in counts_of_uneven(size).items():
            assert sorted(results[name]) == list(range(count)), name


class Result(dict):
    """As a model's output."""


def gathers_structures():
    rank = this_rank()
    loader = prepare(numbers(7))
    results = {"before": gather_for_metrics(torch.tensor([rank]))}
    for batch in loader:  # the last: [6, 0, 1] and [2, 3, 4], of which 6 alone is real
        words = [f"w{value}" for value in batch.tolist()]
        results |= {
            "loss": gather_for_metrics(batch.float().mean()),
            "losses": gather_for_metrics({"loss": torch.tensor(float(rank)), "x": batch}),
            "rows": gather_for_metrics((batch.reshape(3, 1), [batch])),
            "classes": gather_for_metrics(torch.zeros(5)),
            "words": gather_for_metrics(words),
            "tuple of words": gather_for_metrics(tuple(words)),
            "word": gather_for_metrics("one"),
            "both": gather_for_metrics(Result(x=batch, words=words)),
            "pair": gather_for_metrics((batch, words)),
            "objects": gather_for_metrics([{"id": word} for word in words]),
            "boxes": gather_for_metrics(
                [{"box": torch.zeros(value + 1), "id": value} for value in batch.tolist()]
            ),
            "asked": gather_for_metrics(list(batch), use_gather_object=True),
            "other length": gather_for_metrics([1, 2]),
        }
        if active_loaders().position.end_of_dataloader:
            break
    results["after"] = gather_for_metrics(batch)
    return results


def test_structures():
    for got in run_ranks(gathers_structures, 2):
        assert got["before"].tolist() == [0, 1]
        assert got["loss"].tolist() == pytest.approx([7 / 3, 3])
        assert got["losses"]["loss"].tolist() == [0, 1]
        assert got["losses"]["x"].tolist() == [6]
        assert got["rows"][0].tolist() == [[6]]
        assert got["rows"][1][0].tolist() == [6]
        assert got["classes"].shape == (10,)
        assert got["words"] == got["tuple of words"] == ["w6"]
        assert got["word"] == ["one", "one"]
        assert type(got["both"]) is Result
        assert (got["both"]["x"].tolist(), got["both"]["words"]) == ([6], ["w6"])
        assert (got["pair"][0].tolist(), got["pair"][1]) == ([6], ["w6"])
        assert got["objects"] == [{"id": "w6"}]
        assert [box["id"] for box in got["boxes"]] == [6]
        assert got["boxes"][0]["box"].shape == (7,)
        assert [each.tolist() for each in got["asked"]] == [6]
        assert got["other length"] == [1, 2, 1, 2]
        assert got["after"].tolist() == [6, 0, 1, 2, 3, 4], "cut outside of the loop"


def gathers_nothing():
    """Rank 1 has found nothing in its images."""
    words = [] if this_rank() else ["a"]
    x = torch.tensor([this_rank()])
    return {
        "list": gather_for_metrics(words),
        "asked": gather_for_metrics(words, use_gather_object=True),
        "dict": gather_for_metrics({"x": x, "words": words, "none": {}}),
        "pair": gather_for_metrics((x, words)),
        "deep": gather_for_metrics({"x": (x, {"words": words})}),
        "nobody": gather_for_metrics((x, (), [])),
        "listed": gather_for_metrics([x, []]),
    }


def test_a_rank_may_have_nothing():
    for got in run_ranks(gathers_nothing, 2):
        assert got["list"] == got["asked"] == ["a"]
        assert got["dict"]["x"].tolist() == [0, 1]
        assert (got["dict"]["words"], got["dict"]["none"]) == (["a"], {})
        assert (got["pair"][0].tolist(), got["pair"][1]) == ([0, 1], ["a"])
        assert got["deep"]["x"][1] == {"words": ["a"]}
        assert got["nobody"][1:] == ((), [])
        assert got["listed"][0].tolist() == [0, 1]
        assert got["listed"][1] == []


def gathers_in_odd_loops():
    loader, other = prepare(numbers(10)), prepare(numbers(7))
    results = {"skipped": seen(skip_first_batches(loader, 1))}
    left = iter(other)
    next(left), next(left)  # at its end, and never closed
    results["beside one that was left"] = seen(loader)
    nested = []
    for batch in loader:
        for _ in other:
            break
        nested += gather_for_metrics(batch).tolist()
    results["nested"] = nested
    taken = skip_first_batches(prepare(DataLoader(Stream(10), batch_size=3)), 1)
    results["dispatched, skipped"] = seen(taken)
    try:
        gather_for_metrics([open])  # a builtin travels by name
        gather_for_metrics([lambda: 0])
    except Exception as error:
        results["error"] = type(error).__name__
    return results


def test_odd_loops():
    for got in run_ranks(gathers_in_odd_loops, 2):
        assert got["skipped"] == [6, 7, 8, 9]
        assert got["beside one that was left"] == list(range(10))
        assert got["nested"] == list(range(10))
        assert got["dispatched, skipped"] == [6, 7, 8, 9]
        assert got["error"] in ("PicklingError", "AttributeError"), "an error was swallowed"


# Order, agreed on by real ranks.


def orders():
    rank = this_rank()
    results = {}
    set_seed(1, device_specific=True)
    for name, config in {"default": {}, "seedable": {"use_seedable_sampler": True}}.items():
        loader = prepare(numbers(8, 2, shuffle=True), **config)
        epochs = [[value for batch in loader for value in batch.tolist()] for _ in range(2)]
        results[name] = epochs
    batches = BatchSampler(
        torch.utils.data.WeightedRandomSampler([1.0] * 8, 8, replacement=False), 2, drop_last=False
    )
    weighted = prepare(DataLoader(range(8), batch_sampler=batches))
    results["weighted"] = [[value for batch in weighted for value in batch.tolist()]]
    own = numbers(8, 2, shuffle=True, generator=torch.Generator().manual_seed(100 + rank))
    own = prepare(own, use_seedable_sampler=True)
    results["generators of one's own"] = [[value for batch in own for value in batch.tolist()]]
    before = torch.rand(()) if rank else None  # ranks that drew differently still agree
    results["after"] = [[v for b in prepare(numbers(8, 2, shuffle=True)) for v in b.tolist()]]
    del before
    return results


def test_ranks_agree_on_the_order():
    first, second = run_ranks(orders, 2)
    again, _ = run_ranks(orders, 2)
    assert first == again, "two launches with one seed differ"
    for name in first:
        for mine, other in zip(first[name], second[name], strict=True):
            assert sorted(mine + other) == list(range(8)), name
    assert first["default"][0] != first["default"][1]
    assert first["seedable"][0] != first["seedable"][1]


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


def dispatches():
    def batches(loader):
        assert isinstance(loader, DataLoaderDispatcher)
        given = [batch.tolist() for batch in loader]
        assert len(loader) == len(given)
        return given

    def stream(count, size=3, **options):
        kind = SizedStream if this_rank() else type("Read", (Reads, SizedStream), {})
        return DataLoader(kind(count), batch_size=size, **options)

    dropping = BatchSampler(range(12), 4, drop_last=True)
    results = {
        "golden": batches(prepare(stream(10))),
        "split": batches(prepare(stream(9, 4), split_batches=True)),
        "padded": batches(prepare(stream(9))),
        "sampler drops last": batches(
            prepare(DataLoader(range(12), batch_sampler=dropping), dispatch_batches=True)
        ),
        "drop_last": batches(prepare(stream(10, drop_last=True))),
        "uneven": batches(prepare(stream(9), even_batches=False)),
        "map-style": batches(prepare(numbers(10), dispatch_batches=True)),
        "twice": [batches(loader := prepare(stream(10))), batches(loader)][1],
        "shuffled": batches(prepare(numbers(12, 3, shuffle=True), dispatch_batches=True)),
        "mixed": list(prepare(numbers(10, collate_fn=with_text), dispatch_batches=True)),
        "widths": list(prepare(DataLoader(Widening(), batch_size=None))),
        "buckets": batches(prepare(buckets(), dispatch_batches=True)),
        "divided buckets": batches(prepare(buckets(), dispatch_batches=True, split_batches=True)),
        "ragged": batches(
            prepare(
                DataLoader(range(1, 8), batch_size=4, collate_fn=padded_to_longest),
                dispatch_batches=True,
                split_batches=True,
            )
        ),
        "sliced": [
            (batch["rows"].tolist(), batch["all"].tolist(), batch["rank"])
            for batch in prepare(
                numbers(7, 2, collate_fn=as_dict), dispatch_batches=True, slice_fn=own_slice
            )
        ],
    }
    PartialState(cpu=True)
    by_hand = DataLoaderDispatcher(
        range(7), slice_fn=own_slice, batch_size=2, collate_fn=as_dict, iteration=3
    )
    results["by hand"] = [
        (batch["rows"].tolist(), batch["all"].tolist(), batch["rank"]) for batch in by_hand
    ]
    results["epoch"] = by_hand.iteration
    mesh = SimpleNamespace(mesh=torch.arange(2)[None], mesh_dim_names=("dp_shard", "tp"))
    results["of one share"] = batches(
        DataLoaderDispatcher(range(5), torch_device_mesh=mesh, batch_size=2)
    )
    active = GradientState()
    loader = prepare(stream(10))
    results["ends"] = [(active.end_of_dataloader, active.remainder) for _ in loader]
    try:
        list(prepare(DataLoader(Failing(9), batch_size=2)))
    except Exception as error:
        results["failure"] = repr(error)
    try:
        list(prepare(DataLoader(Widening(), batch_size=None, collate_fn=str), split_batches=True))
    except Exception as error:
        results["no rows"] = repr(error)
    return results


@pytest.fixture(scope="module")
def dispatched():
    return run_ranks(dispatches, 2)


def test_rank_0_reads_for_all(dispatched):
    first, second = dispatched
    assert (first["golden"], second["golden"]) == ([[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]])
    assert (first["split"][-1], second["split"]) == ([8], [[2, 3], [6, 7], [0]])
    assert (first["padded"], second["padded"]) == ([[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 0]])
    assert (first["drop_last"], second["drop_last"]) == ([[0, 1, 2]], [[3, 4, 5]])
    whole = [[0, 1, 2, 3]], [[4, 5, 6, 7]]
    assert (first["sampler drops last"], second["sampler drops last"]) == whole
    assert (first["uneven"], second["uneven"]) == (first["padded"], second["padded"])
    assert first["map-style"] == first["twice"] == first["golden"]
    assert second["map-style"] == second["twice"] == second["golden"]
    assert sorted(itertools.chain(*first["shuffled"], *second["shuffled"])) == list(range(12))
    assert (first["buckets"], second["buckets"]) == ([[0, 1], [4]], [[2, 3], [0, 1]])
    assert first["divided buckets"] == [[0], [2], [4]]
    assert second["divided buckets"] == [[1], [3], [4]]
    assert (first["ragged"][0][0], second["ragged"][0][0]) == ([1] * 4, [3] * 4)
    assert (first["ragged"][1], second["ragged"][1]) == ([[5] * 7, [6] * 7], [[7] * 7, [5] * 7])
    assert first["sliced"] == [([0, 1], [0, 1, 2, 3], 0), ([4, 5], [4, 5, 6, 0], 0)]
    assert second["sliced"] == [([2, 3], [0, 1, 2, 3], 1), ([6, 0], [4, 5, 6, 0], 1)]
    assert first["ends"] == second["ends"] == [(False, -1), (True, 4)]
    for got in (first, second):
        assert got["by hand"] == got["sliced"]
        assert got["epoch"] == 4
        assert got["of one share"] == [[0, 1], [2, 3], [4]]
    assert first["failure"] == "OSError('unreadable')"
    assert "rank 0 could not read the next batch: OSError: unreadable" in second["failure"]
    for got in (first, second):
        assert "has no rows to divide" in got["no rows"]


def test_batches_of_any_form_are_dispatched(dispatched):
    first, second = dispatched
    numbers, texts, counts = second["mixed"][1]
    assert numbers.tolist() == [8, 9]
    assert texts == ("t8", "t9")
    assert counts["n"] in (1, 3)
    assert [batch["x"].shape[1] for batch in first["widths"]] == [1, 3, 5]
    assert [batch["x"].shape[1] for batch in second["widths"]] == [2, 4, 5]
    assert [batch["text"] for batch in second["widths"]] == [["t2"] * 2, ["t4"] * 2, ["t5"]]
    assert [batch["n"] for batch in second["widths"][:2]] == [2, 4]


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


def ends_early():
    results = {
        "each its own": steps_and_samples(prepare(numbers(9), even_batches=False), 1),
        "even": steps_and_samples(prepare(numbers(10), dispatch_batches=True), 2),
    }
    resumed = prepare(numbers(5, 2), even_batches=False)
    resumed.load_state_dict(resumed.state_dict())
    rest = list(skip_first_batches(resumed, 1))  # all that rank 1 has, and half of rank 0's
    results["skipped"] = len(rest), resumed.iteration
    return results


def test_ranks_make_the_same_steps_until_one_has_no_more():
    first, second = run_ranks(ends_early, 2, timeout=30)
    assert first["each its own"] == ([[0, 1, 2], [6, 7, 8]], 9)
    assert second["each its own"] == ([[3, 4, 5]], 9)
    assert (first["even"][1], second["even"][1]) == (10, 10)
    assert (first["skipped"], second["skipped"]) == ((1, 1), (0, 1)), "in the same epoch"


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
