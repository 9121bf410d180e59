"""Prepared loaders for which rank 0 alone reads the data; it sends the other ranks their parts.

A *round* is the samples on which all ranks work at the same step::

    rank 0   _lead     reads a round -> divides it (RoundDivider) -> broadcasts the header
                                                                   -> scatters the buffers
    others   _follow   receive the header -> allocate a buffer -> receive it -> their part

The header has the structure of every rank's batch, and the values in it that are not tensors. In
place of each tensor it has one on torch's meta device, of the same shape and type.

Every rank gets a batch and takes part in the same collectives each round. A pass over the loader
ends for the other ranks with a header that says that there is no more data, or that reading failed.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from notebook_accel.errors import ConfigError
from notebook_accel.training import collectives
from notebook_accel.training.collectives import nested
from notebook_accel.training.data.loaders import PreparedLoader
from notebook_accel.training.data.samplers import RoundBatch, has_own_batches
from notebook_accel.training.processes import topology
from notebook_accel.training.processes.random_numbers import synchronize_rng_state
from notebook_accel.training.stepping.active_loaders import Position, ShortRound

# A tensor of any type may begin at a multiple of it.
_ALIGNMENT = 16


class DataLoaderDispatcher(PreparedLoader):
    """A DataLoader that rank 0 alone reads; rank 0 sends each rank its part of the batches.

    ``prepare`` makes a dispatcher if ``dispatch_batches`` is True, and by default for an iterable
    dataset whose batches are put on a device. All ranks iterate over it together, and each gets its
    batches on its own device.

    Args:
        dataset: the dataset, as for torch's ``DataLoader``. Only rank 0 reads it.
        split_batches: True: each batch of the loader is divided over the ranks. False: each rank
            gets a batch of the loader per step.
        skip_batches: number of batches to skip at the start of each epoch.
        use_stateful_dataloader: keep torchdata's ``StatefulDataLoader`` inside, which saves and
            restores the state of a dataset that has ``state_dict``.
        _drop_last: as ``drop_last`` of torch's ``DataLoader``.
        _non_blocking: copy from pinned memory while the CPU continues.
        slice_fn: cuts the part of one rank out of the batch that rank 0 has read for all, called
            with the batch, a slice, ``process_index`` and ``num_processes``. None takes the rows of
            the slice.
        torch_device_mesh: mesh of the ranks, if several of them hold one model together; these get
            the same batches.
        iteration: number of the epoch to begin with; 0 is the first.
        **kwargs: further arguments of torch's DataLoader.

    Raises:
        ConfigError: ``use_stateful_dataloader`` is set, and torchdata is not installed.

    Example:
        >>> import torch
        >>> from notebook_accel import Accelerator, DataLoaderConfiguration, DataLoaderDispatcher
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(8))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=4)
        >>> config = DataLoaderConfiguration(dispatch_batches=True)
        >>> loader = Accelerator(dataloader_config=config).prepare(loader)
        >>> isinstance(loader, DataLoaderDispatcher), len(loader)
        (True, 2)
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if _drop_last:
            kwargs["drop_last"] = True
        self._make_by_hand(
            dataset,
            use_stateful_dataloader,
            kwargs,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            device=topology.topology().device,
            skip_batches=skip_batches or None,
            split_batches=split_batches,
            non_blocking=_non_blocking,
            slice_fn=slice_fn,
        )

    _marks_last_round = True
    _shard = None
    _num_readers = 1

    @property
    def _keeps_batches(self) -> bool:
        return self.batch_sampler is not None and has_own_batches(self.batch_sampler)

    def _num_batches(self) -> int:
        rounds = super()._num_batches() / self._batches_a_round
        return math.floor(rounds) if self._drops_last else math.ceil(rounds)

    def _synchronize(self) -> None:
        # The order is rank 0's; nobody else reads.
        for rng_type in self.rng_types:
            if rng_type != "generator":
                synchronize_rng_state(rng_type)

    def _read(self, position: Position) -> Iterator[Any]:
        # One rank reads for all, not one of each group that holds a model together: those must get
        # the very same samples, and two readers of a stream may get different ones.
        if collectives.num_ranks() == 1:
            return self._read_from(position, position.num_given)
        return self._lead(position) if collectives.this_rank() == 0 else self._follow()

    def _lead(self, position: Position) -> Iterator[RoundBatch]:
        start = position.num_given * self._batches_a_round
        # In an epoch that is resumed, too, the last round is filled up from the start of the epoch,
        # unless the dataset goes on there by itself.
        is_counted = start > 0 and start not in position.reader_states
        keeps_first = is_counted and not self._drops_last
        divider = RoundDivider(
            num_parts=self._options.data_group.size,
            batches_a_round=self._batches_a_round,
            batch_size=None if self._keeps_batches else self.given_batch_size,
            drop_last=self._drops_last,
            keeps_batches=self._keeps_batches,
            slice_fn=self._options.slice_fn,
        )
        batches = self._read_from(position, start, keeps_first)
        rounds = divider.divide(batches, keeps_first)
        while True:
            try:
                divided = next(rounds, None)
                header, buffers = _pack(divided, self._options.data_group.index_of_rank)
            except Exception as error:
                # The others wait for a header, and without one they would wait for ever.
                collectives.broadcast_object_list(
                    [pickle.dumps(f"{type(error).__name__}: {error}")]
                )
                raise
            collectives.broadcast_object_list([header])
            if divided is None:
                return
            if buffers:
                collectives.scatter(buffers, buffers[0].nbytes)
            yield divided[0]

    def _follow(self) -> Iterator[RoundBatch]:
        # The header is pickled by rank 0, a member of the same group: what it holds is trusted as
        # much as that rank's code is.
        while True:
            (packed,) = collectives.broadcast_object_list([None])
            header = pickle.loads(packed)  # None at the end, the text of an error, or a round's
            if header is None:
                return
            if isinstance(header, str):
                raise RuntimeError(f"rank 0 could not read the next batch: {header}")
            forms, num_bytes = header
            # Nothing is sent where no rank's batch holds a tensor.
            buffer = (
                collectives.scatter(None, num_bytes)
                if num_bytes
                else torch.empty(0, dtype=torch.uint8)
            )
            yield _fill(forms[self._options.data_group.index], buffer)


def _pack(
    divided: list[RoundBatch] | None, index_of_rank: Sequence[int]
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the pickled header and a buffer for each rank.

    ``divided`` is None at the pass's end.
    """
    if divided is None:
        return pickle.dumps(None), []
    others = set(index_of_rank[1:])  # rank 0 has its own part already
    forms = {
        index: divided[index]._replace(
            batch=nested.recursively_apply(
                lambda one: torch.empty_like(one, device="meta"), divided[index].batch
            )
        )
        for index in others
    }
    num_bytes = max((_places(form)[1] for form in forms.values()), default=0)
    header = pickle.dumps((forms, num_bytes))
    if not num_bytes:
        return header, []
    # A scatter needs one length on all ranks.
    buffers = [torch.empty(num_bytes, dtype=torch.uint8, device="cpu") for _ in divided]
    for index in others:
        for start, tensor in _places(divided[index])[0]:
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            buffers[index][start : start + plain.nbytes] = collectives.as_bytes(plain)
    return header, [buffers[index] for index in index_of_rank]


def _places(part: RoundBatch) -> tuple[list[tuple[int, torch.Tensor]], int]:
    """Return each tensor with the byte at which it begins in a buffer, and the buffer's length."""
    found, end = [], 0
    for tensor in (leaf for leaf in nested.leaves(part.batch) if isinstance(leaf, torch.Tensor)):
        start = end + -end % _ALIGNMENT
        found.append((start, tensor))
        end = start + tensor.nbytes
    return found, end


def _fill(form: RoundBatch, buffer: torch.Tensor) -> RoundBatch:
    """Return the part of which ``form`` has the structure, with the tensors in ``buffer``."""
    starts = iter([start for start, _ in _places(form)[0]])

    def read(tensor: torch.Tensor) -> torch.Tensor:
        start = next(starts)
        return buffer[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)

    return form._replace(batch=nested.recursively_apply(read, form.batch))


@dataclass
class RoundDivider:
    """Divides a pass's batches among the ranks (those of one model count as one), on rank 0.

    A *round* is what all ranks work on at the same step: one batch per rank, or with
    ``split_batches`` one batch for all of them. With 2 ranks, 10 samples and batches of 3::

        rank 0 reads   [0 1 2] [3 4 5]     a batch for each rank, all of one size: they stay whole
                       [6 7 8] [9]         otherwise: joined, and divided evenly:  [6 7]  [8 9]

    If the samples do not divide evenly, samples from the first batch of the pass (run over the
    loader) fill up the last parts. Two kinds of batches stay whole: those that cannot be joined
    (padded to different lengths, say), and those of a user's own batch sampler, whose samples
    belong together. A rank for which no batch is left then gets the first batch of the pass again.
    With ``split_batches``, each batch of a user's own batch sampler is divided, and filled up with
    its own samples.

    Each rank gets something in each round, whatever ``even_batches`` says, as with Accelerate: a
    rank whose loop ended before those of the others would leave them waiting in a collective.
    """

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
            own, ranks = slice(start, start + share), self.num_parts
            if self.slice_fn is None:
                part = slice_rows(filled, own)
            else:
                part = self.slice_fn(filled, own, process_index=len(parts), num_processes=ranks)
            parts.append(RoundBatch(part, last, False))
        return parts

    def _keep_whole(self, batches: list[Any]) -> list[RoundBatch]:
        """Return a whole batch for each rank; the pass's first where none is left."""
        if self.slice_fn is not None or self.batches_a_round == 1:
            setting = "slice_fn_for_dispatch" if self.slice_fn else "split_batches=True"
            reason = (
                "has no rows to divide, or no others to be joined with: expected tensors of the "
                "same shapes, with one row for each sample; pad them"
            )
            if self._has_several_rows_a_sample():
                reason = (
                    f"has {self._most_rows} rows for batch_size={self.batch_size}, so that rows of "
                    "one sample could come apart: give tensors a dimension for those of a sample"
                )
            elif self.keeps_batches:
                reason = "is of a batch sampler of your own: such are divided with split_batches"
            raise ConfigError(
                f"{setting} divides batches over {self.num_parts} processes, and a batch "
                f"({type(batches[0]).__name__}) {reason}, or leave {setting} out"
            )
        missing = self.num_parts - len(batches)
        repeated = RoundBatch(self.first, ShortRound(-1, count_rows(self.first), 0), True)
        return [*(RoundBatch(batch, None, True) for batch in batches), *[repeated] * missing]


def _repeat_rows(source: Any, missing: int) -> Iterator[Any]:
    """Yield slices from the start of ``source``, again and again, up to ``missing`` rows in all."""
    available = count_rows(source) or 1
    while missing > 0:
        yield slice_rows(source, slice(min(missing, available)))
        missing -= available


def count_rows(batch: Any) -> int | None:
    """Return the rows of a batch's tensors or of its list; None if that is not clear."""
    size = nested.find_batch_size(batch)
    if size is None:
        return len(batch) if _is_column(batch) else None
    tensors = (
        leaf for leaf in nested.leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim
    )
    return size if all(tensor.shape[0] == size for tensor in tensors) else None


def _is_column(value: Any) -> bool:
    """Return whether a sequence holds one object per row (words, say), not the parts of a batch."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return not any(isinstance(item, (torch.Tensor, list, tuple, Mapping)) for item in value)


def slice_rows(batch: Any, own: slice) -> Any:
    """Return the rows ``own`` of a batch; values without rows are kept as they are."""
    rows = count_rows(batch)

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[own] if value.ndim else value
        if _is_column(value) and len(value) == rows:
            return value[own]
        if isinstance(value, (list, tuple)):
            return nested.honor_type(value, (cut(item) for item in value))
        if isinstance(value, Mapping):
            return nested.rebuild(value, {key: cut(item) for key, item in value.items()})
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
        return nested.honor_type(first, (join_rows(list(column)) for column in columns))
    if isinstance(first, Mapping):
        return nested.rebuild(
            first, {key: join_rows([each[key] for each in batches]) for key in first}
        )
    return first
