"""Collectives as users call them by themselves: ``notebook_accel.utils.gather`` and its like.

They join what ranks computed from different samples, as the methods of this rank's newest
``Accelerator`` do: over its data group, in which each sample counts once. The functions of
``collectives`` join all ranks unless they are given a group; the rest of ``training`` uses those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training import collectives
from notebook_accel.training.collectives.data_group import current_data_group

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["gather", "gather_object", "pad_across_processes", "reduce"]


def _data_ranks() -> dist.ProcessGroup | None:
    found = current_data_group()
    return None if found is None else found.process_group


def gather(tensor: Any) -> Any:
    """The tensors of all ranks, joined along the first dimension, in any nesting.

    A tensor of shape ``(n, ...)`` becomes ``(num_ranks * n, ...)``, one without a dimension
    ``(num_ranks,)``. Ranks that hold one model together count as one.

    Args:
        tensor: tensors of the same shapes on every rank.

    Raises:
        TypeError: a leaf is not a tensor.
    """
    return collectives.gather(tensor, group=_data_ranks())


def gather_object(object: Any) -> list[Any]:  # noqa: A002
    """Join the objects of all ranks in one list; all ranks call it.

    Ranks that hold one model together (tensor parallelism, pipelines) count as one.

    Args:
        object: a list or tuple of picklable objects, whose items are joined. Anything else, a
            string too, counts as one object.

    Returns:
        The list.

    Example:
        >>> from notebook_accel import gather_object
        >>> gather_object(["a", "b"])
        ['a', 'b']
    """
    return collectives.gather_object(object, group=_data_ranks())


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine every tensor of a nested structure over the ranks; new tensors, same on all.

    Args:
        tensor: tensors of the same shapes on every rank.
        reduction: "sum", "mean", "max", "min", or "none", which gives ``tensor`` as it is.
        scale: accepted, and without effect, as in Accelerate on everything but XLA.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: an unknown reduction.
    """
    return collectives.reduce(tensor, reduction, scale, group=_data_ranks())


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Pad every tensor of a nested structure to the largest size that a rank has on ``dim``.

    Args:
        tensor: tensors whose other dimensions are the same on every rank; those that lack
            ``dim`` stay as they are.
        dim: the dimension to pad.
        pad_index: the value to pad with.
        pad_first: pad in front rather than behind.

    Raises:
        TypeError: a leaf is not a tensor.
    """
    return collectives.pad_across_processes(tensor, dim, pad_index, pad_first, group=_data_ranks())
