"""How the batches that rank 0 has read are divided over all ranks.

A *round* is what all ranks work on at the same step: one batch per rank, or with ``split_batches``
one batch for all of them. With 2 ranks, 10 samples and batches of 3::

    rank 0 reads   [0 1 2] [3 4 5]      a batch for each rank, all of one size: they stay whole
                   [6 7 8] [9]          otherwise: joined, and divided evenly:  [6 7]  [8 9]

If the samples do not divide evenly, samples from the first batch of the pass (run over the loader)
fill up the last parts. Two kinds of batches stay whole: those that cannot be joined (padded to
different lengths, say), and those of a user's own batch sampler, whose samples belong together. A
rank for which no batch is left then gets the first batch of the pass again. With ``split_batches``,
each batch of a user's own batch sampler is divided, and filled up with its own samples.

Each rank gets something in each round, whatever ``even_batches`` says, as with Accelerate: a rank
whose loop ended before those of the others would leave them waiting in a collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training.collectives.nested import find_batch_size, honor_type, leaves, rebuild
from notebook_accel.training.data.samplers import RoundBatch
from notebook_accel.training.stepping.active_loaders import ShortRound


@dataclass
class RoundDivider:
    """Divides a pass's batches among the ranks (those of one model count as one), on rank 0."""

    num_parts: int
    batches_a_round: int
    batch_size: int | None = None
    drop_last: bool = False
    keeps_batches: bool = False
    slice_fn: Callable[..., Any] | None = None
    first: Any = field(default=None, init=False)
    _most_rows: int = field(default=0, init=False)

    def divide(self, raw: Iterator[Any], has_first: bool = False) -> Iterator[list[RoundBatch]]:
        """Yield the rounds of a pass, each as a list with one batch for every rank."""
        if has_first:
            self.first = next(raw, None)
        batches = [*itertools.islice(raw, self.batches_a_round)]
        # A round that lacks batches is left out as a whole, as the samplers do.
        while batches and not (self.drop_last and len(batches) < self.batches_a_round):
            if self.first is None:
                self.first = batches[0]
            yield self._divide_round(batches)
            batches = [*itertools.islice(raw, self.batches_a_round)]

    def _divide_round(self, batches: list[Any]) -> list[RoundBatch]:
        sizes = {count_rows(batch) for batch in batches}
        self._most_rows = max(self._most_rows, *(size or 0 for size in sizes))
        if self.slice_fn is None and len(batches) == self.num_parts and len(sizes) == 1:
            return [RoundBatch(batch, None, sizes == {None}) for batch in batches]
        is_joined = None not in sizes and (self.batches_a_round == 1 or not self.keeps_batches)
        joined = _try_to_join(batches) if is_joined else None
        rows = None if joined is None else count_rows(joined)
        if not rows or self._has_several_rows_a_sample():
            return self._keep_whole(batches)
        return self._divide_evenly(joined, rows)

    def _has_several_rows_a_sample(self) -> bool:
        """Whether dividing a batch could separate the rows of a sample."""
        if self.batch_size is None:
            return False
        # In a pass that is resumed, the first batch of the epoch is in none of the rounds.
        self._most_rows = max(self._most_rows, count_rows(self.first) or 0)
        return self._most_rows > self.batch_size

    def _divide_evenly(self, joined: Any, rows: int) -> list[RoundBatch]:
        """Return parts with the same number of rows.

        The last ones filled up with repeated samples.
        """
        share = math.ceil(rows / self.num_parts)
        missing = share * self.num_parts - rows
        lacks = self.batch_size is not None and rows < self.batch_size * self.batches_a_round
        is_short = missing > 0 or lacks
        # Samples of two batches are not mixed where they belong together.
        source = joined if self.keeps_batches else self.first
        filled = joined
        if missing:
            # The first batch may be of another form (padded to another length, say).
            filled = _try_to_join([joined, *_repeat_rows(source, missing)])
            if filled is None:
                filled = join_rows([joined, *_repeat_rows(joined, missing)])
        parts: list[RoundBatch] = []
        for start in range(0, share * self.num_parts, share):
            last = ShortRound(rows, share, min(max(rows - start, 0), share)) if is_short else None
            part = self._slice(filled, start, start + share, len(parts))
            parts.append(RoundBatch(part, last, False))
        return parts

    def _slice(self, batch: Any, start: int, stop: int, index: int) -> Any:
        if self.slice_fn is None:
            return slice_rows(batch, start, stop)
        return self.slice_fn(
            batch, slice(start, stop), process_index=index, num_processes=self.num_parts
        )

    def _keep_whole(self, batches: list[Any]) -> list[RoundBatch]:
        """Return a whole batch for each rank; the pass's first where none is left."""
        is_divided = self.slice_fn is not None or self.batches_a_round == 1
        if is_divided and self._has_several_rows_a_sample():
            setting = "slice_fn_for_dispatch" if self.slice_fn else "split_batches=True"
            raise ConfigError(
                f"{setting} divides batches over {self.num_parts} processes, but a batch has "
                f"{self._most_rows} rows for batch_size={self.batch_size}, and dividing it could "
                "separate rows of one sample: expected a row for each sample; give tensors a "
                f"dimension for those of a sample, or leave {setting} out"
            )
        if self.slice_fn is not None:
            reason = (
                "those of a batch sampler of your own are not joined: pass split_batches=True"
                if self.keeps_batches
                else f"those ({type(batches[0]).__name__}) could not be joined: expected tensors "
                "of the same shapes beyond the first dimension; pad them"
            )
            raise ConfigError(
                f"slice_fn_for_dispatch takes a rank's part out of joined batches, and {reason}, "
                "or leave slice_fn_for_dispatch out"
            )
        if self.batches_a_round == 1:
            raise ConfigError(
                f"split_batches=True divides each batch over {self.num_parts} processes, but a "
                f"batch ({type(batches[0]).__name__}) has no rows to divide: expected tensors "
                "with the same first dimension; use split_batches=False"
            )
        missing = self.num_parts - len(batches)
        repeated = RoundBatch(self.first, ShortRound(-1, count_rows(self.first), 0), True)
        return [*(RoundBatch(batch, None, True) for batch in batches), *[repeated] * missing]


def _repeat_rows(source: Any, missing: int) -> Iterator[Any]:
    """Yield slices from the start of ``source``, again and again, up to ``missing`` rows in all."""
    available = count_rows(source) or 1
    while missing > 0:
        yield slice_rows(source, 0, min(missing, available))
        missing -= available


def count_rows(batch: Any) -> int | None:
    """Return the rows of a batch's tensors or of its list; None if that is not clear."""
    size = find_batch_size(batch)
    if size is None:
        return len(batch) if _is_column(batch) else None
    tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return size if all(tensor.shape[0] == size for tensor in tensors) else None


def _is_column(value: Any) -> bool:
    """Return whether a sequence holds one object per row (words, say), not the parts of a batch."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return not any(isinstance(item, (torch.Tensor, list, tuple, Mapping)) for item in value)


def slice_rows(batch: Any, start: int, stop: int) -> Any:
    """Return the rows ``start:stop`` of a batch; values without rows are kept as they are."""
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
    """Return the batches joined into one; None if their forms differ (in their padding, say)."""
    try:
        return join_rows(batches)
    except (RuntimeError, TypeError, ValueError, KeyError):
        return None


def join_rows(batches: list[Any]) -> Any:
    """Return one batch with the rows of several; a value without rows is that of the first batch.

    Raises:
        RuntimeError, TypeError, ValueError, KeyError: the batches are of different forms.
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
