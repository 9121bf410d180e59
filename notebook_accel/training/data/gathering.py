"""Results of a batch from all ranks, without those of repeated samples.

The samples that were repeated to fill the last round up come last in the order of the ranks (see
``samplers``). So of results that are joined in that order, the first ``LastRound.num_samples`` rows
are kept. Where ranks have batches of different sizes, each first cuts the repeated ones off its
own, and what is left is joined by its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.training.agreement import require_agreement
from notebook_accel.training.collectives import (
    compares,
    gather,
    gather_object,
    gather_ragged,
    num_ranks,
)
from notebook_accel.training.data.active import Position, active_loaders
from notebook_accel.training.nested import honor_type, is_namedtuple, leaves, rebuild
from notebook_accel.training.nested import recursively_apply as apply_to_tensors

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["gather_for_metrics"]


def gather_for_metrics(
    input_data: Any,
    use_gather_object: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Join what the ranks computed from their batches, each sample counted once.

    Samples that were repeated to fill up the last batches are left out. Outside of a loop over a
    prepared loader nothing is.

    Args:
        input_data: tensors, in any nesting, whose first dimension is that of the batch (those
            of another size, and single numbers such as a loss, are all kept); lists of objects,
            one a sample; or a dict or tuple of both.
        use_gather_object: gather everything as objects: a list a rank, of which one list is made.
        group: one rank of each share of the data; all ranks unless given.

    Returns:
        The same structure, with tensors of ``(num_samples, ...)`` and lists of ``num_samples``.
    """
    position = active_loaders().position
    if compares(group):
        found = [*leaves(input_data)]
        are_tensors = found and all(isinstance(leaf, torch.Tensor) for leaf in found)
        what = input_data if are_tensors and not use_gather_object else "objects"
        require_agreement("gather_for_metrics", what, group, free_dimension=0)
    if use_gather_object:
        return gather_object(_cut_objects(input_data, position), group=group)
    return _gather(input_data, position, group)


def _gather(data: Any, position: Position | None, group: dist.ProcessGroup | None) -> Any:
    """Gather tensors as tensors and everything else as objects.

    Every rank must come to the same collectives here. A list that is empty on this rank may hold
    objects on another (boxes that were found in an image, say), so it is gathered as objects.
    """
    found = [isinstance(leaf, torch.Tensor) for leaf in leaves(data)]
    are_tensors = bool(found) and all(found)
    if are_tensors and not _holds_empty(data):
        return _gather_tensors(data, position, group)
    if isinstance(data, Mapping):
        return rebuild(data, {key: _gather(item, position, group) for key, item in data.items()})
    is_record = isinstance(data, tuple) and (any(found) or is_namedtuple(data))
    if is_record or are_tensors:
        return honor_type(data, (_gather(item, position, group) for item in data))
    gathered = gather_object(_cut_objects(data, position), group=group)
    return data if not gathered and isinstance(data, tuple) else gathered


def _holds_empty(data: Any) -> bool:
    """Whether a list or tuple somewhere in ``data`` has nothing in it."""
    if isinstance(data, Mapping):
        return any(_holds_empty(item) for item in data.values())
    if isinstance(data, (list, tuple)):
        return not data or any(_holds_empty(item) for item in data)
    return False


def _cut_objects(data: Any, position: Position | None) -> Any:
    """This rank's objects without those of repeated samples."""
    last = None if position is None else position.last_round
    is_column = isinstance(data, (list, tuple)) and not is_namedtuple(data)
    if last is None or not is_column or last.batch_size not in (None, len(data)):
        return data
    return _cut(data, last.batch_size, last.num_own_samples)


def _cut(rows: Any, expected: int | None, kept: int) -> Any:
    """The rows that are not repeated.

    Where the size of the batch is not known: all rows, or none if the whole batch is repeated.
    """
    return rows[:kept] if expected is not None or not kept else rows


def _gather_tensors(data: Any, position: Position | None, group: dist.ProcessGroup | None) -> Any:
    if position is None or num_ranks(group) == 1:
        return gather(data, group=group)
    if position.is_uneven:
        return _gather_uneven(data, position, group)
    last = position.last_round
    if last is None:
        return gather(data, group=group)

    def join(tensor: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = gather(tensor, group=group)
        is_of_batch = tensor.ndim > 0 and tensor.shape[0] == last.batch_size
        return joined[: last.num_samples] if is_of_batch else joined

    return apply_to_tensors(join, data)


def _gather_uneven(data: Any, position: Position, group: dist.ProcessGroup | None) -> Any:
    last = position.last_round

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor.reshape(1)
        if last is None or last.batch_size not in (None, tensor.shape[0]):
            return tensor
        return _cut(tensor, last.batch_size, last.num_own_samples)  # type: ignore[no-any-return]

    cuts = [cut(leaf) for leaf in leaves(data)]
    joined = iter(gather_ragged(cuts, group=group))
    return apply_to_tensors(lambda _: next(joined), data)
