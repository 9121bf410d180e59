"""Slips that no error tells of: a loader not prepared, a plain backward, a model unwrapped."""

from contextlib import suppress
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from tqdm.auto import tqdm

from notebook_accel import Accelerator
from tests.training.harness import on_ranks, warnings_about
from tests.training.parts import update

_DATA = TensorDataset(torch.arange(16.0).reshape(8, 2))


def prepared(**settings):
    accelerator = Accelerator(cpu=True, **settings)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    return accelerator, *accelerator.prepare(model, optimizer)


class _Stream(IterableDataset[torch.Tensor]):
    def __init__(self, rank, num_ranks):
        self.place = rank, num_ranks

    def __iter__(self):
        return islice(
            (torch.full((2,), float(n)) for n in range(800)), self.place[0], None, self.place[1]
        )


def _loader(kind, accelerator):
    rank, size = accelerator.process_index, accelerator.num_processes
    if kind == "sampler":
        return DataLoader(_DATA, 2, sampler=DistributedSampler(_DATA, size, rank))
    if kind == "stream":
        return DataLoader(_Stream(rank, size), 2)
    if kind == "same stream":
        return DataLoader(_Stream(0, 1), 2)
    if kind == "part":
        return DataLoader(_DATA.tensors[0][rank::size], 2)
    loader = DataLoader(_DATA, 2, shuffle=True)
    return accelerator.prepare(loader) if kind == "prepared" else loader


class _Torn(Dataset[torch.Tensor]):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 2:
            raise OSError("truncated file")
        return torch.full((2,), float(index))


class _Tolerant(DataLoader[torch.Tensor]):
    """A user's loader, which leaves out samples that cannot be read."""

    def __iter__(self):
        batches = super().__iter__()
        assert len(batches) == len(self)
        for _ in range(len(self)):
            with suppress(OSError):
                yield next(batches)


@on_ranks(2)
def test_a_loader_can_be_read_on_after_a_bad_sample():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    plain = _Tolerant(_Torn(), batch_size=1)
    prepared = accelerator.prepare(_Tolerant(_Torn(), batch_size=1))
    mine = [[0, 4], [1, 3, 5]][accelerator.process_index]
    for loader, samples in ((plain, [0, 1, 3, 4, 5]), (prepared, mine), (prepared, mine)):
        assert [float(batch[0, 0]) for batch in loader] == samples


@pytest.mark.parametrize(
    ("kind", "is_told"),
    {
        "unprepared": True,
        "same stream": True,
        "prepared": False,
        "sampler": False,
        "stream": False,
        "part": False,
        "evaluated": False,
    }.items(),
)
@on_ranks(2)
def test_a_loader_that_was_not_prepared_is_named_once(kind, is_told):
    torch.manual_seed(1)
    accelerator, model, optimizer = prepared()
    train_loader = _loader(kind, accelerator)
    with warnings_about("prepared") as told:
        for _ in range(1 if "stream" in kind else 3):
            if kind == "evaluated":
                model.eval()
            # Counted, as a bar does it: the name is the one of this line.
            for batch in tqdm(train_loader, disable=True):
                inputs = batch[0] if isinstance(batch, list) else batch
                if kind != "evaluated":
                    update(accelerator, optimizer, model(inputs).sum())
            assert len(list(train_loader)) > 1
    line = (
        "train_loader was not prepared: the ranks train on the same batches, 2 times each. Write "
        "train_loader = accelerator.prepare(train_loader)"
    )
    # Rank 0 warns for the machine.
    assert told == [line] * (is_told and accelerator.is_main_process)


class _Lazy(dict):
    def items(self):
        raise AssertionError("it would import all that it has")


@on_ranks(2)
def test_what_is_evaluated_on_all_ranks_says_nothing_of_a_loader_of_its_name():
    accelerator, model, optimizer = prepared()
    lazy, data = _Lazy(), SimpleNamespace(val=DataLoader(_DATA, 2))
    with warnings_about("prepared") as told:
        with torch.no_grad():
            assert lazy == {}
            assert [model(inputs).shape for (inputs,) in data.val]
        loader = DataLoader(_DATA, 2, sampler=DistributedSampler(_DATA))
        for (inputs,) in loader:
            update(accelerator, optimizer, model(inputs).sum())
    assert told == []


@pytest.mark.parametrize(("is_in_dictionary", "name"), [(True, "ours['train']"), (False, "loader")])
@on_ranks(2)
def test_a_loader_without_a_variable_is_named(is_in_dictionary, name):
    accelerator, model, optimizer = prepared()
    ours = {"train": DataLoader(_DATA, 2), "val": DataLoader(_DATA, 2)}
    with warnings_about("prepared") as told:
        for _ in range(2):
            for (inputs,) in ours["train"] if is_in_dictionary else DataLoader(_DATA, 2):
                update(accelerator, optimizer, model(inputs).sum())
    assert len(told) == accelerator.is_main_process
    assert all(text.startswith(f"{name} was not prepared: ") for text in told)


@pytest.mark.parametrize(
    ("is_plain", "num_steps", "is_told"), [(True, 2, True), (True, 1, False), (False, 2, False)]
)
@on_ranks(1)
def test_a_plain_backward_inside_accumulate_is_named_once(is_plain, num_steps, is_told):
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=num_steps)
    with warnings_about("loss.backward()") as told:
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = model(torch.ones(1, 2)).sum()
                loss.backward() if is_plain else accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    assert len(told) == is_told
    assert all("not divided by 2. Write accelerator.backward(loss)" in text for text in told)


@pytest.mark.parametrize(
    ("way", "is_told"),
    {"wrapper": False, "forward": False, "module": True, "unwrapped": True}.items(),
)
@on_ranks(2)
def test_training_without_the_wrapper_is_named_once(way, is_told):
    accelerator, model, optimizer = prepared()
    called = {
        "wrapper": model,
        "forward": model.forward,
        "module": model.module,
        "unwrapped": accelerator.unwrap_model(model),
    }[way]
    with warnings_about("without its wrapper") as told:
        for _ in range(2):
            update(accelerator, optimizer, called(torch.ones(1, 2)).sum())
    # Rank 0 warns for the machine.
    assert len(told) == (is_told and accelerator.is_main_process)
    assert all(text.startswith("Linear is trained without its wrapper") for text in told)
