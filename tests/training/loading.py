"""Loaders small enough to write down what they give, and how tests prepare them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.training.collectives.data_group import DataGroup
from notebook_accel.training.data import prepare_loader
from notebook_accel.training.settings.handlers import DataLoaderConfiguration
from notebook_accel.training.stepping.active_loaders import active_loaders

CPU = torch.device("cpu")


def prepare(loader: Any, rank: int = 0, size: int = 1, device: Any = CPU, **config: Any) -> Any:
    return prepare_loader(
        loader,
        config=DataLoaderConfiguration(**config),
        device=device,
        data_group=DataGroup.of_all_ranks(size, rank),
    )


@pytest.fixture(autouse=True)
def no_pass_is_left() -> Iterator[None]:
    active_loaders().clear()
    yield
    assert not active_loaders().stack, "a pass was left behind"


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


class Sharded(Stream):
    """As an iterable dataset of Hugging Face's, which divides itself."""

    num_shards = 12

    def __init__(self, count: int, step: int = 1, start: int = 0) -> None:
        super().__init__(count)
        self.step, self.start = step, start

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.start, self.count, self.step))

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.count, num_shards, index)


class Doubled(DataLoader[Any]):
    """A loader of the user's, whose batches come from a generator."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * 2


# What each rank reads of a loader: samples, batch size, ranks, settings, batches of each rank.
TABLE = [
    (8, 3, 2, {}, ["012 670", "345 123"]),
    (7, 3, 2, {}, ["012 601", "345 234"]),
    (6, 3, 2, {}, ["012", "345"]),
    (2, 3, 2, {}, ["010", "101"]),
    (1, 4, 4, {}, ["0000", "0000", "0000", "0000"]),
    (0, 3, 2, {}, ["", ""]),
    (10, 3, 1, {}, ["012 345 678 9"]),
    (10, 2, 3, {}, ["01 67", "23 89", "45 01"]),
    (8, 3, 3, {}, ["012", "345", "670"]),
    (10, 3, 2, {"even": False}, ["012 678", "345 9"]),
    (7, 3, 2, {"even": False}, ["012 6", "345"]),
    (10, 3, 2, {"drop": True}, ["012", "345"]),
    (9, 3, 3, {"drop": True}, ["012", "345", "678"]),
    (10, 4, 2, {"split": True}, ["01 45 89", "23 67 01"]),
    (9, 4, 2, {"split": True, "even": False}, ["01 45 8", "23 67"]),
    (9, 4, 2, {"split": True}, ["01 45 80", "23 67 12"]),
    (10, 4, 2, {"split": True, "drop": True}, ["01 45", "23 67"]),
    (10, 6, 3, {"split": True}, ["01 67", "23 89", "45 01"]),
    (2, 4, 2, {"split": True}, ["01", "01"]),
]
# Batches of a batch sampler of one's own.
LISTS = [[0], [1, 2], [3, 4, 5]]


def read(text: str) -> list[list[int]]:
    """Batches as a table has them: ``012 67`` is two."""
    return [[int(digit) for digit in batch] for batch in text.split()]
