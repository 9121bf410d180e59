"""Gather the results of a batch from all ranks, without the results of repeated samples.

Samples are repeated to fill up the last round (step of all ranks) of a pass over a loader. In that
round, and wherever ranks have batches of different sizes, each rank first cuts the rows of repeated
samples off its own results (``ShortRound`` tells how many). The remaining rows are joined, however
many each rank has. In all other rounds the results are joined unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from notebook_accel.training import collectives
from notebook_accel.training.collectives import require_agreement
from notebook_accel.training.collectives.nested import honor_type, is_namedtuple, leaves, rebuild
from notebook_accel.training.collectives.nested import recursively_apply as apply_to_tensors
from notebook_accel.training.stepping.active_loaders import Position, active_loaders


def gather_for_metrics(
    input_data: Any, use_gather_object: bool = False, *, group: dist.ProcessGroup | None = None
) -> Any:
    """Join what the ranks computed from their batches, each sample counted once; all ranks call it.

    Results of samples that were repeated to fill up the last batches are left out. Outside of a
    loop over a prepared loader, nothing is left out.

    Args:
        input_data: tensors, in any nesting, with one row for each sample of this rank's batch (or
            as many rows as the batch size that the loader was made with); lists of objects, one per
            sample; or a dict or tuple of both. Tensors with another number of rows, and single
            numbers such as a loss, are joined whole.
        group: the ranks whose results are joined: one rank for each share of the data, so that
            ranks that read the same samples count once. None means all ranks.

    Returns:
        The same structure, with tensors of shape ``(num_samples, ...)`` and lists of
        ``num_samples`` items, where ``num_samples`` is the number of different samples that all
        ranks have at this step.
    """
    position = active_loaders().position
    if collectives.compares(group):
        found = [*leaves(input_data)]
        are_tensors = found and all(isinstance(leaf, torch.Tensor) for leaf in found)
        # As below: a list that is empty here may hold objects on another rank.
        is_alike = are_tensors and not (use_gather_object or _holds_empty(input_data))
        what = input_data if is_alike else "objects"
        require_agreement("gather_for_metrics", what, group, free_dimension=0)
    if use_gather_object:
        return collectives.gather_object(_cut_objects(input_data, position, group), group=group)
    return _gather(input_data, position, group)


def _gather(data: Any, position: Position, group: dist.ProcessGroup | None) -> Any:
    """Gather tensors as tensors and everything else as objects, both without repeated samples.

    Dictionaries, tuples and lists of tensors keep their structure; lists of other objects are
    joined over the ranks. All ranks must call the same collectives. A list that is empty on this
    rank does not show what it holds on other ranks (boxes found in an image, say), so it is
    gathered as objects. Therefore a list that may be empty on some rank must not hold tensors.
    """
    found = [isinstance(leaf, torch.Tensor) for leaf in leaves(data)]
    are_tensors = bool(found) and all(found)
    if are_tensors and not _holds_empty(data):
        if position.short_round is None and not position.is_uneven:
            return collectives.gather(data, group=group)
        num_shares = collectives.num_ranks(group)
        own: list[torch.Tensor] = []
        for leaf in leaves(data):
            if leaf.ndim:
                own.append(leaf[: _num_own_rows(len(leaf), position, num_shares)])
            else:
                own.append(leaf.reshape(1))
        joined = iter(collectives.gather_ragged(own, group=group))
        return apply_to_tensors(lambda _: next(joined), data)
    if isinstance(data, Mapping):
        return rebuild(data, {key: _gather(item, position, group) for key, item in data.items()})
    is_record = isinstance(data, tuple) and (any(found) or is_namedtuple(data))
    if is_record or are_tensors:
        return honor_type(data, (_gather(item, position, group) for item in data))
    gathered = collectives.gather_object(_cut_objects(data, position, group), group=group)
    return data if not gathered and isinstance(data, tuple) else gathered


def _holds_empty(data: Any) -> bool:
    """Return whether a list or tuple somewhere in ``data`` is empty."""
    if isinstance(data, Mapping):
        return any(_holds_empty(item) for item in data.values())
    if isinstance(data, (list, tuple)):
        return not data or any(_holds_empty(item) for item in data)
    return False


def _cut_objects(data: Any, position: Position, group: dist.ProcessGroup | None) -> Any:
    """Return this rank's list of objects without those of repeated samples."""
    is_column = isinstance(data, (list, tuple)) and not is_namedtuple(data)
    if position.short_round is None or not is_column:
        return data
    return data[: _num_own_rows(len(data), position, collectives.num_ranks(group))]


def _num_own_rows(num_rows: int, position: Position, num_shares: int) -> int:
    """Return how many rows to keep: all, if their number does not stand for samples."""
    last, loader = position.short_round, position.loader
    # Where the last round has nothing for this rank, its loop still has the batch before, all of
    # whose rows count.
    if last is None or last.batch_size == 0:
        return num_rows
    if last.batch_size is None:  # unknown: all rows, or none if the whole batch is repeated
        return num_rows if last.num_own_samples else 0
    if num_rows == last.batch_size:
        return last.num_own_samples
    if num_rows == loader.given_batch_size:
        # A value repeated to the loader's batch size: Transformers' Trainer repeats the loss of a
        # batch so, to weigh all samples alike. Each sample keeps as many rows as a sample of a full
        # round has.
        return last.num_own_samples * num_rows * num_shares // int(loader.total_batch_size)
    return num_rows
