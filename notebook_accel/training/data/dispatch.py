"""Prepared loaders for which rank 0 alone reads the data; it sends the other ranks their parts.

A *round* is the samples on which all ranks work at the same step::

    rank 0   _lead     reads a round -> divides it (rounds) -> broadcasts the header
                                                            -> scatters the buffers
    others   _follow   receive the header -> allocate a buffer -> receive it -> their part

The header has the structure of every rank's batch, and the values in it that are not tensors. In
place of each tensor it has a slot, which tells where in the rank's buffer the tensor lies.

Every rank gets a batch and takes part in the same collectives each round. A pass over the loader
ends for the other ranks with a header that says that there is no more data, or that reading failed.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from notebook_accel.training.collectives import (
    as_bytes,
    broadcast_object_list,
    num_ranks,
    scatter,
    this_rank,
)
from notebook_accel.training.collectives.nested import recursively_apply
from notebook_accel.training.data.loaders import PreparedLoader
from notebook_accel.training.data.rounds import RoundDivider
from notebook_accel.training.data.samplers import RoundBatch, has_own_batches
from notebook_accel.training.processes import topology
from notebook_accel.training.processes.seeding import synchronize_rng_state
from notebook_accel.training.stepping.active_loaders import Position

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
    def _batches_a_step(self) -> int:
        return self._batches_a_round

    @property
    def _keeps_batches(self) -> bool:
        return self.batch_sampler is not None and has_own_batches(self.batch_sampler)

    def _num_batches(self) -> int:
        num_read, a_round = super()._num_batches(), self._batches_a_round
        if self._drops_last:
            return num_read // a_round
        return math.ceil(num_read / a_round)

    def _synchronize(self) -> None:
        # The order is rank 0's; nobody else reads.
        for rng_type in self.rng_types:
            if rng_type != "generator":
                synchronize_rng_state(rng_type)

    def _read(self, position: Position) -> Iterator[Any]:
        # One rank reads for all, not one of each group that holds a model together: those must get
        # the very same samples, and two readers of a stream may get different ones.
        if num_ranks() == 1:
            return self._read_from(position, position.num_given)
        return self._lead(position) if this_rank() == 0 else self._follow()

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
                broadcast_object_list([pickle.dumps(f"{type(error).__name__}: {error}")])
                raise
            broadcast_object_list([header])
            if divided is None:
                return
            if buffers:
                scatter(buffers, buffers[0].nbytes)
            yield divided[0]

    def _follow(self) -> Iterator[RoundBatch]:
        # The header is pickled by rank 0, a member of the same group: what it holds is trusted as
        # much as that rank's code is.
        while True:
            (packed,) = broadcast_object_list([None])
            header = pickle.loads(packed)  # None at the end, the text of an error, or a round's
            if header is None:
                return
            if isinstance(header, str):
                raise RuntimeError(f"rank 0 could not read the next batch: {header}")
            # Nothing is sent where no rank's batch holds a tensor.
            num_bytes = header.num_bytes
            buffer = scatter(None, num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
            part = header.parts[self._options.data_group.index]
            assert part is not None, "rank 0 sends the others theirs"
            yield _fill_slots(part, buffer)


class _Header(NamedTuple):
    """A round without its tensors: ``parts`` with a :class:`_Slot` for each.

    No buffer if 0 bytes.
    """

    parts: list[RoundBatch | None]
    num_bytes: int


class _Slot(NamedTuple):
    """Where a tensor lies in a rank's buffer (bytes ``start:stop``), its shape and dtype."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _pack(
    divided: list[RoundBatch] | None, index_of_rank: Sequence[int]
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the pickled header and a buffer for each rank.

    ``divided`` is None at the pass's end.
    """
    if divided is None:
        return pickle.dumps(None), []
    parts: list[RoundBatch | None] = []
    contents: list[list[tuple[_Slot, torch.Tensor]]] = []
    others = set(index_of_rank[1:])  # rank 0 has its own part already
    for index, part in enumerate(divided):
        held: list[tuple[_Slot, torch.Tensor]] = []
        parts.append(_empty_slots(part, held) if index in others else None)
        contents.append(held)
    num_bytes = max((held[-1][0].stop for held in contents if held), default=0)
    header = pickle.dumps(_Header(parts, num_bytes))
    if not num_bytes:
        return header, []
    buffers = [_lay_out(held, num_bytes) for held in contents]
    return header, [buffers[index] for index in index_of_rank]


def _empty_slots(part: RoundBatch, held: list[tuple[_Slot, torch.Tensor]]) -> RoundBatch:
    """Return ``part`` with slots in place of tensors; both are appended to ``held``."""

    def take_out(tensor: torch.Tensor) -> _Slot:
        start = held[-1][0].stop if held else 0
        start += -start % _ALIGNMENT
        slot = _Slot(start, start + tensor.nbytes, tuple(tensor.shape), tensor.dtype)
        held.append((slot, tensor))
        return slot

    return part._replace(batch=recursively_apply(take_out, part.batch))


def _lay_out(held: list[tuple[_Slot, torch.Tensor]], num_bytes: int) -> torch.Tensor:
    """Return a buffer with the tensors in their slots; a scatter needs one length on all ranks."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    for slot, tensor in held:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        buffer[slot.start : slot.stop] = as_bytes(plain)
    return buffer


def _fill_slots(part: RoundBatch, buffer: torch.Tensor) -> RoundBatch:
    def put_in(slot: _Slot) -> torch.Tensor:
        return buffer[slot.start : slot.stop].view(slot.dtype).reshape(slot.shape)

    batch = recursively_apply(put_in, part.batch, test_type=lambda one: isinstance(one, _Slot))
    return part._replace(batch=batch)
