"""Loaders small enough to write down what they give, and how tests prepare them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.training.data import prepare_data_loader
from notebook_accel.training.data.config import DataLoaderConfiguration
from notebook_accel.training.data_group import DataGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CPU", "SizedStream", "Stream", "lists", "numbers", "prepare"]

CPU = torch.device("cpu")


def prepare(
    loader: Any,
    rank: int = 0,
    size: int = 1,
    device: Any = CPU,
    ordinal: int = 0,
    **config: Any,
) -> Any:
    return prepare_data_loader(
        loader,
        config=DataLoaderConfiguration(**config),
        device=device,
        data_group=DataGroup.of_all_ranks(size, rank),
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
