"""How the batches that one rank has read are divided over all of them.

::

    rank 0 reads    [0 1 2] [3 4 5]   [6 7 8] [9]
                     rank 0  rank 1    joined: 6 7 8 9 -> rank 0: 6 7, rank 1: 8 9
                    alike: as they are

Where the batches of a round are alike, each goes whole to its rank. Else they are joined, filled
up from the first batch of the pass and divided evenly; those that don't join, and those of a
user's own batch sampler, stay whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training.data.samplers import LastRound
from notebook_accel.training.nested import find_batch_size, honor_type, leaves, rebuild

__all__ = ["Part", "Round", "RoundDealer", "count_rows", "join_rows", "slice_rows"]


class Part(NamedTuple):
    """What one rank gets of a round."""

    batch: Any
    last_round: LastRound | None


class Round(NamedTuple):
    """What each rank gets (None: nothing), and whether their sizes may differ."""

    parts: list[Part | None]
    is_uneven: bool


@dataclass
class RoundDealer:
    """Divides the batches of one pass.

    Attributes:
        num_parts: number of ranks.
        batches_a_round: how many batches the ranks share at each step.
        batch_size: samples a batch, None where it is not known.
        drop_last: leave out a round that lacks batches.
        is_uneven: divide what lacks samples as it is, rather than fill it up.
        keeps_batches: never mix samples of two batches, which a user's own batch sampler made.
    """

    num_parts: int
    batches_a_round: int
    batch_size: int | None = None
    drop_last: bool = False
    is_uneven: bool = False
    keeps_batches: bool = False
    first: Any = field(default=None, init=False)

    def deal(self, raw: Iterator[Any]) -> Iterator[Round]:
        """The rounds of a pass.

        Raises:
            ConfigError: a batch that has to be divided has no rows.
        """
        while batches := [*itertools.islice(raw, self.batches_a_round)]:
            # A round that lacks batches is dropped whole, as the samplers do.
            if len(batches) < self.batches_a_round and self.drop_last:
                return
            if self.first is None:
                self.first = batches[0]
            yield self._deal_round(batches)

    def _deal_round(self, batches: list[Any]) -> Round:
        sizes = {count_rows(batch) for batch in batches}
        if len(batches) == self.num_parts and len(sizes) == 1:
            is_uneven = self.is_uneven or sizes == {None}
            return Round([Part(batch, None) for batch in batches], is_uneven)
        is_joined = None not in sizes and (self.batches_a_round == 1 or not self.keeps_batches)
        joined = _try_to_join(batches) if is_joined else None
        rows = None if joined is None else count_rows(joined)
        # More rows than samples: a collate function made several of one, which would be parted.
        if rows is None or rows > self._most_rows:
            return self._deal_whole(batches)
        if self.is_uneven:
            return Round(self._divide_unevenly(joined, rows), True)
        return Round(self._divide_evenly(joined, rows), False)

    @property
    def _most_rows(self) -> float:
        return math.inf if self.batch_size is None else self.batch_size * self.batches_a_round

    def _divide_evenly(self, joined: Any, rows: int) -> list[Part | None]:
        share = math.ceil(rows / self.num_parts)
        missing = share * self.num_parts - rows
        source = joined if self.keeps_batches else self.first
        filled = join_rows([joined, *_filling(source, missing)]) if missing else joined
        parts: list[Part | None] = []
        for start in range(0, share * self.num_parts, share):
            last = LastRound(rows, share, min(max(rows - start, 0), share)) if missing else None
            parts.append(Part(slice_rows(filled, start, start + share), last))
        return parts

    def _divide_unevenly(self, joined: Any, rows: int) -> list[Part | None]:
        quotient, extra = divmod(rows, self.num_parts)
        sizes = [quotient + (index < extra) for index in range(self.num_parts)]
        ends = itertools.accumulate(sizes)
        return [
            Part(slice_rows(joined, end - size, end), None) if size else None
            for size, end in zip(sizes, ends, strict=True)
        ]

    def _deal_whole(self, batches: list[Any]) -> Round:
        if self.batches_a_round == 1:
            raise ConfigError(
                f"split_batches=True divides each batch over {self.num_parts} processes, but a "
                f"batch ({type(batches[0]).__name__}) has no rows to divide: expected tensors "
                "with the same first dimension; use split_batches=False"
            )
        missing = self.num_parts - len(batches)
        repeated = Part(self.first, LastRound(-1, count_rows(self.first), 0))
        filling = [None if self.is_uneven else repeated] * missing
        return Round([*(Part(batch, None) for batch in batches), *filling], True)


def _filling(source: Any, missing: int) -> Iterator[Any]:
    """``missing`` samples from the start of ``source``, again and again where it has fewer."""
    available = count_rows(source) or 1
    while missing > 0:
        yield slice_rows(source, 0, min(missing, available))
        missing -= available


def count_rows(batch: Any) -> int | None:
    """Samples in a batch, None where its parts do not say the same."""
    size = find_batch_size(batch)
    if size is None:
        return len(batch) if _is_column(batch) else None
    tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return size if all(tensor.shape[0] == size for tensor in tensors) else None


def _is_column(value: Any) -> bool:
    """Whether a sequence holds one object a sample, rather than parts of a batch."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return not any(isinstance(item, (torch.Tensor, list, tuple, Mapping)) for item in value)


def slice_rows(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a batch."""
    rows = count_rows(batch)

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[start:stop] if value.ndim else value
        if _is_column(value) and len(value) == rows:
            return value[start:stop]
        if isinstance(value, (list, tuple)):
            return honor_type(value, (cut(item) for item in value))
        if isinstance(value, Mapping):
            return rebuild(value, {key: cut(item) for key, item in value.items()})
        return value

    return cut(batch)


def _try_to_join(batches: list[Any]) -> Any:
    try:
        return join_rows(batches)
    except (RuntimeError, ValueError, KeyError):
        return None  # padded to lengths of their own, say


def join_rows(batches: list[Any]) -> Any:
    """The samples of several batches as one.

    Raises:
        RuntimeError, ValueError, KeyError: the batches are of different forms.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(batches) if first.ndim else first
    if _is_column(first):
        return type(first)(itertools.chain(*batches))
    if isinstance(first, (list, tuple)):
        columns = zip(*batches, strict=True)
        return honor_type(first, (join_rows(list(column)) for column in columns))
    if isinstance(first, Mapping):
        return rebuild(first, {key: join_rows([each[key] for each in batches]) for key in first})
    return first
