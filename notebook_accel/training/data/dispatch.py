"""Prepared loaders for which rank 0 alone reads the data; it sends the other ranks their parts.

A *round* is the samples on which all ranks work at the same step::

    rank 0   _lead     reads a round -> divides it (rounds) -> broadcasts the header
                                                            -> scatters the buffers
    others   _follow   receive the header -> allocate a buffer -> receive it -> their part

The header has the structure of every rank's batch, and the values in it that are not tensors. In
place of each tensor it has one on torch's meta device, of the same shape and type.

Every rank gets a batch and takes part in the same collectives each round. A pass over the loader
ends for the other ranks with a header that says that there is no more data, or that reading failed.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from notebook_accel.training.collectives import (
    as_bytes,
    broadcast_object_list,
    num_ranks,
    scatter,
    this_rank,
)
from notebook_accel.training.collectives.nested import leaves, recursively_apply
from notebook_accel.training.data.loaders import PreparedLoader
from notebook_accel.training.data.rounds import RoundDivider
from notebook_accel.training.data.samplers import RoundBatch, has_own_batches
from notebook_accel.training.processes import topology
from notebook_accel.training.processes.random_numbers import synchronize_rng_state
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
            forms, num_bytes = header
            # Nothing is sent where no rank's batch holds a tensor.
            buffer = scatter(None, num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
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
            batch=recursively_apply(
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
            buffers[index][start : start + plain.nbytes] = as_bytes(plain)
    return header, [buffers[index] for index in index_of_rank]


def _places(part: RoundBatch) -> tuple[list[tuple[int, torch.Tensor]], int]:
    """Return each tensor with the byte at which it begins in a buffer, and the buffer's length."""
    found, end = [], 0
    for tensor in (leaf for leaf in leaves(part.batch) if isinstance(leaf, torch.Tensor)):
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

    return form._replace(batch=recursively_apply(read, form.batch))
