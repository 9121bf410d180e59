"""Prepared loaders for which rank 0 alone reads the data; it sends the other ranks their parts.

A *round* is the samples on which all ranks work at the same step: one batch per rank, or with
``split_batches`` one batch for all of them. Ranks that hold one model together get the same part of
it (a *share*) and count as one::

    rank 0   _lead     reads a round -> divides it (_rounds) -> broadcasts the parts' lengths
                                                             -> scatters them: pickle and tensors
    others   _follow   receive both, and have their part in the memory that came

Every rank gets a batch and takes part in the same collectives each round. A pass over the loader
ends for the other ranks with None in place of lengths, or with a text that says why reading failed.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
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
_ALIGNMENT = 64


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

    @property
    def _rows_a_batch(self) -> int | None:
        """Rows of a full batch if each sample has one; None if batches have no common size."""
        return None if self._keeps_batches else self.given_batch_size

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
        rounds = self._rounds(self._read_from(position, start, keeps_first), keeps_first)
        shares = self._options.data_group.index_of_rank
        while True:
            try:
                divided = next(rounds, None)
                # Each as its pickle, and after it the memory of its tensors and arrays. Rank 0 has
                # its own part already. Pickled here: what cannot be pickled is told too.
                parts: dict[int, list[memoryview]] = {}
                for share in {*shares[1:]}:
                    if divided is not None:
                        file, memory = io.BytesIO(), list[pickle.PickleBuffer]()
                        pickler = _PartPickler(file, protocol=5, buffer_callback=memory.append)
                        pickler.dump(divided[share])
                        parts[share] = [file.getbuffer(), *(each.raw() for each in memory)]
            except Exception as error:
                # The others wait for their parts, and without an answer they would wait for ever.
                told = pickle.dumps(f"{type(error).__name__}: {error}")
                collectives.broadcast_object_list([told])
                raise
            if divided is None:
                collectives.broadcast_object_list([pickle.dumps(None)])
                return
            lengths = {share: [*map(len, part)] for share, part in parts.items()}
            # A scatter needs one length on all ranks.
            num_bytes = max(place.stop for each in lengths.values() for place in _places(each))
            collectives.broadcast_object_list([pickle.dumps((lengths, num_bytes))])
            empty = partial(torch.empty, num_bytes, dtype=torch.uint8, device="cpu")
            rows = {share: empty() for share in {*shares}}
            for share, part in parts.items():
                for place, each in zip(_places(lengths[share]), part, strict=True):
                    rows[share].numpy()[place] = each
            collectives.scatter([rows[share] for share in shares], num_bytes)
            yield divided[0]

    def _follow(self) -> Iterator[RoundBatch]:
        # Pickled by rank 0, a member of the same group: what it sends is trusted as much as that
        # rank's code is.
        while (told := pickle.loads(collectives.broadcast_object_list([None])[0])) is not None:
            if isinstance(told, str):
                raise RuntimeError(f"rank 0 could not read the next batch: {told}")
            lengths, num_bytes = told
            row = collectives.scatter(None, num_bytes).numpy().data
            part, *memory = [
                row[place] for place in _places(lengths[self._options.data_group.index])
            ]
            yield pickle.loads(part, buffers=memory)

    def _rounds(self, read: Iterator[Any], has_first: bool) -> Iterator[list[RoundBatch]]:
        """Yield the rounds of a pass on rank 0, each as a list with one batch for every share.

        With 2 ranks, 10 samples and batches of 3::

            rank 0 reads   [0 1 2] [3 4 5]    a batch for each rank, all of one size: they stay
                           [6 7 8] [9]        otherwise: joined, and divided evenly: [6 7] [8 9]

        Two kinds of batches stay whole: those that cannot be joined (padded to different lengths,
        say), and those of a user's own batch sampler, whose samples belong together. With
        ``split_batches``, each batch of such a sampler is divided, and filled up with its own
        samples.

        Each rank gets something in each round, whatever ``even_batches`` says, as with Accelerate:
        a rank whose loop ended before those of the others would leave them waiting in a collective.

        Args:
            read: batches of the loader inside.
            has_first: whether ``read`` begins with the first batch of the epoch, which is in no
                round of this pass.
        """
        size, slice_fn = self._batches_a_round, self._options.slice_fn
        num_shares = self._options.data_group.size
        first = next(read, None) if has_first else None
        most_rows = count_rows(first) or 0
        batches = [*itertools.islice(read, size)]
        # A round that lacks batches is left out as a whole, as the samplers do.
        while batches and not (self._drops_last and len(batches) < size):
            first = batches[0] if first is None else first
            counts = {count_rows(batch) for batch in batches}
            most_rows = max(most_rows, *(rows or 0 for rows in counts))
            if slice_fn is None and len(batches) == num_shares and len(counts) == 1:
                yield [RoundBatch(batch, None, counts == {None}) for batch in batches]
            else:
                # Neither rows of one sample nor samples that belong together come apart.
                is_whole = most_rows > (self._rows_a_batch or most_rows)
                is_whole |= None in counts or (size > 1 and self._keeps_batches)
                joined = None if is_whole else _try_to_join(batches)
                if rows := count_rows(joined):
                    yield self._divide_evenly(joined, rows, first)
                else:
                    yield self._keep_whole(batches, first, most_rows)
            batches = [*itertools.islice(read, size)]

    def _divide_evenly(self, joined: Any, rows: int, first: Any) -> list[RoundBatch]:
        """Return parts with the same number of rows, the last ones filled up with repeated ones."""
        num_shares, slice_fn = self._options.data_group.size, self._options.slice_fn
        share = math.ceil(rows / num_shares)
        missing = share * num_shares - rows
        is_short = missing > 0 or rows < (self._rows_a_batch or 0) * self._batches_a_round
        filled = joined
        if missing:
            # Samples of two batches are not mixed where they belong together. And the first batch
            # may be of another form (padded to another length, say).
            source = joined if self._keeps_batches else first
            filled = _try_to_join([joined, *_repeat_rows(source, missing)])
            if filled is None:
                filled = join_rows([joined, *_repeat_rows(joined, missing)])
        parts: list[RoundBatch] = []
        for index in range(num_shares):
            start = index * share
            last = ShortRound(rows, share, min(max(rows - start, 0), share)) if is_short else None
            own = slice(start, start + share)
            if slice_fn is None:
                part = slice_rows(filled, own)
            else:
                part = slice_fn(filled, own, process_index=index, num_processes=num_shares)
            parts.append(RoundBatch(part, last, False))
        return parts

    def _keep_whole(self, batches: list[Any], first: Any, most_rows: int) -> list[RoundBatch]:
        """Return a whole batch for each share; the first of the epoch where none is left."""
        slice_fn, size = self._options.slice_fn, self._rows_a_batch
        num_shares = self._options.data_group.size
        if slice_fn is not None or self._batches_a_round == 1:
            setting = "slice_fn_for_dispatch" if slice_fn else "split_batches=True"
            reason = (
                "has no rows to divide, or no others to be joined with: expected tensors of the "
                "same shapes, with one row for each sample; pad them"
            )
            if size is not None and most_rows > size:
                reason = (
                    f"has {most_rows} rows for batch_size={size}, so that rows of "
                    "one sample could come apart: give tensors a dimension for those of a sample"
                )
            elif self._keeps_batches:
                reason = "is of a batch sampler of your own: such are divided with split_batches"
            raise ConfigError(
                f"{setting} divides batches over {num_shares} processes, and a batch "
                f"({type(batches[0]).__name__}) {reason}, or leave {setting} out"
            )
        missing = num_shares - len(batches)
        repeated = RoundBatch(first, ShortRound(-1, count_rows(first), 0), True)
        return [*(RoundBatch(batch, None, True) for batch in batches), *[repeated] * missing]


class _PartPickler(pickle.Pickler):
    """Pickles tensors as their bytes: torch pickles slower, and a view with all of its memory."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return _tensor_of, (collectives.as_bytes(plain).numpy(), value.dtype, value.shape)


def _tensor_of(data: np.ndarray[Any, Any], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _places(lengths: Iterable[int]) -> Iterator[slice]:
    """Yield where each memory of so many bytes lies in a row; any type may begin there."""
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length + -length % _ALIGNMENT


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

    def has_rows(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.ndim > 0
        return _is_column(value) and len(value) == rows

    return nested.recursively_apply(lambda value: value[own], batch, test_type=has_rows)


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
