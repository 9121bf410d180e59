"""A stream that ``datasets.distributed.split_dataset_by_node`` has split is not split again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from torch.utils.data import DataLoader, IterableDataset

from notebook_accel import Accelerator
from tests.training.harness import run_ranks


class OfOneRank(IterableDataset[int]):
    def __init__(self, rank: int) -> None:
        self._distributed = SimpleNamespace(rank=rank, world_size=2)

    def __iter__(self) -> Iterator[int]:
        yield from range(self._distributed.rank, 8, 2)


def read_own() -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(OfOneRank(accelerator.process_index), batch_size=2))
    return [int(sample) for batch in loader for sample in batch]


def test_a_split_stream_is_left_as_it_is() -> None:
    assert run_ranks(read_own, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
