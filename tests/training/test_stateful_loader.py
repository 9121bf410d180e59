"""Loaders of datasets that say themselves how far they are, by torchdata."""

import pickle
import sys

import accelerate
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from notebook_accel import Accelerator, ConfigError, DataLoaderConfiguration, skip_first_batches
from notebook_accel.training.data.dispatch import DataLoaderDispatcher
from notebook_accel.training.data.loader_wrapper import SkipDataLoader
from notebook_accel.training.data.loaders import DataLoaderShard
from tests.training.harness import on_ranks
from tests.training.loading import Doubled, lists, numbers, prepare


class Resumable(IterableDataset):
    """Counts up to ``count``, from where it is told to; notes what it reads."""

    def __init__(self, count):
        self.count = count
        self.next = 0
        self.read = []

    def __iter__(self):
        start, self.next = self.next, 0
        for number in range(start, self.count):
            self.next = number + 1
            self.read.append(number)
            yield number
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Rows:
    """A dataset that is read by index, and has a state."""

    def __len__(self):
        return 27

    def __getitem__(self, index):
        return index

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


STATEFUL = {"use_stateful_dataloader": True}
# P shares, what of DataLoaderConfiguration; each share reads alone here, without a group.
KINDS = {
    "each rank reads": {"dispatch_batches": False},
    "split": {"dispatch_batches": False, "split_batches": True},
    "not filled up": {"dispatch_batches": False, "even_batches": False},
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_stream_goes_on_without_reading_what_came_before(size, kind, workers):
    if workers and kind != "each rank reads":
        pytest.skip("one kind with processes is enough")

    def make(rank):
        loader = DataLoader(Resumable(27), batch_size=4, num_workers=workers)
        return prepare(loader, rank, size, **STATEFUL, **KINDS[kind])

    for rank in range(size):
        plain = DataLoader(Resumable(27), batch_size=4)
        whole = lists(prepare(plain, rank, size, **KINDS[kind]))
        loader, seen = make(rank), []
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if number == 1:
                state = loader.state_dict()
        assert seen == whole
        resumed = make(rank)
        assert isinstance(resumed.base_dataloader, StatefulDataLoader)
        resumed.load_state_dict(state)
        rest = lists(resumed)
        assert rest[:-1] == whole[2:-1]
        last = {24, 25, 26}  # beside those repeated, here from where the pass began to read
        assert last.intersection(rest[-1]) == last.intersection(whole[-1])
        if not workers:
            stream = getattr(resumed.dataset, "dataset", resumed.dataset)
            samples = 2 * 4 * (size if kind != "split" else 1)
            assert stream.read[0] == samples, "what came before was not read again"
        assert lists(resumed) == whole, "the next epoch is whole"


def test_a_state_of_another_place_is_not_used():
    loader = prepare(DataLoader(Resumable(20), batch_size=4), **STATEFUL)
    running = iter(loader)
    next(running), next(running)
    state = loader.state_dict()
    other = prepare(DataLoader(Resumable(20), batch_size=4), **STATEFUL)
    other.load_state_dict(state)
    assert lists(skip_first_batches(other, 3)) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    wider = prepare(DataLoader(Resumable(20), batch_size=8), **STATEFUL)
    wider.load_state_dict(state)
    assert lists(wider) == [[*range(8, 16)], [*range(16, 20)]]


def test_without_a_state_of_their_own_loaders_count():
    loader = prepare(numbers(10), **STATEFUL)
    assert isinstance(loader.base_dataloader, StatefulDataLoader)
    running = iter(loader)
    next(running)
    resumed = prepare(numbers(10), **STATEFUL)
    resumed.load_state_dict(loader.state_dict())
    assert lists(resumed) == [[3, 4, 5], [6, 7, 8], [9]]


class Shifted(DataLoaderShard):
    """Derived from ours, with batches of its own."""

    def __iter__(self):
        return (batch + 100 for batch in super().__iter__())


@pytest.mark.parametrize(
    ("kind", "peer"),
    [
        (DataLoaderShard, accelerate.data_loader.DataLoaderShard),
        (DataLoaderDispatcher, accelerate.data_loader.DataLoaderDispatcher),
        (Shifted, None),
    ],
)
def test_a_loader_that_is_made_by_hand_goes_on_as_accelerates_does(kind, peer):
    for each in (kind, peer) if peer else (kind,):
        loader, resumed = (
            each(Resumable(10), use_stateful_dataloader=True, batch_size=3) for _ in range(2)
        )
        running = iter(loader)
        assert [next(running).tolist()[0] % 100 for _ in range(2)] == [0, 3]
        resumed.load_state_dict(loader.state_dict())
        assert [batch.tolist()[0] % 100 for batch in resumed] == [6, 9]
        assert resumed.dataset.read == [6, 7, 8, 9], "what came before was not read again"
        assert isinstance(resumed.base_dataloader, StatefulDataLoader)
    again = pickle.loads(pickle.dumps(kind(range(4), use_stateful_dataloader=True)))
    assert isinstance(again, kind)
    assert isinstance(again.base_dataloader, StatefulDataLoader)
    assert [batch.item() % 100 for batch in again] == [0, 1, 2, 3]


def test_a_users_own_loader_goes_on_by_counting():
    """What it gives has no state; its own batches are what the loop gets all the same."""

    def make():
        return prepare(Doubled(Resumable(8), batch_size=2), **STATEFUL)

    loader = make()
    running = iter(loader)
    assert [next(running).tolist() for _ in range(2)] == [[0, 2], [4, 6]]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert lists(resumed) == [[8, 10], [12, 14]]
    prepared = prepare(DataLoader(Resumable(8), batch_size=2), **STATEFUL)
    assert lists(skip_first_batches(prepared, 3)) == [[6, 7]]


@pytest.mark.parametrize("kind", ["dispatched", "alone", "shuffled"])
@on_ranks(2)
def test_ranks_go_on_from_a_checkpoint(kind, tmp_path):
    """Dispatched, and torchdata's own loader given to ``prepare``."""
    dispatched = {"dispatched": None, "alone": False, "shuffled": True}[kind]

    def make():
        config = DataLoaderConfiguration(dispatch_batches=dispatched, use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        if kind == "shuffled":  # by torch's own sampler, which has no state
            return accelerator, accelerator.prepare(DataLoader(Rows(), batch_size=3, shuffle=True))
        return accelerator, accelerator.prepare(StatefulDataLoader(Resumable(27), batch_size=3))

    def save_after(number, batches, accelerator):
        seen = []
        for batch in batches:
            seen.append(batch.tolist())
            if len(seen) == number:
                # Each into a folder of its own: rank 0 may write the next one while rank 1 loads.
                accelerator.save_state(tmp_path / f"after {number}")
                accelerator.wait_for_checkpoint()  # what a late rank adds
        return seen

    def goes_on(number):
        accelerator, loader = make()
        accelerator.load_state(tmp_path / f"after {number}")
        rest = lists(loader)
        # What fills the last round up is from where the pass began to read.
        assert (rest[:-1], len(rest)) == (whole[3:-1], len(whole) - 3)
        return loader

    accelerator, loader = make()
    whole = save_after(3, loader, accelerator)
    resumed = goes_on(3)
    if kind != "shuffled":
        stream = getattr(resumed.dataset, "dataset", resumed.dataset)
        assert min(stream.read, default=18) >= 18, "what came before was not read again"
        accelerator, loader = make()
        assert save_after(1, skip_first_batches(loader, 2), accelerator) == whole[2:]
        goes_on(1)


def test_torchdata_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(ConfigError, match="pip install torchdata"):
        prepare(numbers(4), **STATEFUL)
    with pytest.raises(ConfigError, match="pip install torchdata"):
        DataLoaderShard(range(4), use_stateful_dataloader=True)
    with pytest.raises(ConfigError, match="pip install torchdata"):
        SkipDataLoader(range(4), use_stateful_dataloader=True)
    assert torch.is_tensor(next(iter(prepare(numbers(4)))))
