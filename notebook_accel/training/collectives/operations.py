"""The public collectives, such as ``notebook_accel.utils.gather``.

They work over the data group of this rank's newest ``Accelerator``, as its methods do. Ranks that
hold one model together compute from the same samples, and the group has only one of them, so that
each sample counts once. The functions in ``collectives``, which the rest of ``training`` uses, work
over all ranks unless they are given a group.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from notebook_accel.training import collectives
from notebook_accel.training.collectives.data_group import current_data_group

__all__ = ["gather", "gather_object", "pad_across_processes", "reduce"]


def _data_ranks() -> dist.ProcessGroup | None:
    found = current_data_group()
    return None if found is None else found.process_group


def gather(tensor: Any) -> Any:
    """Join the tensors of all ranks, in the order of the ranks; all ranks call it.

    Ranks that hold one model together (tensor parallelism, pipelines) count as one.

    Args:
        tensor: a tensor, or lists, tuples and mappings of tensors; the same shapes on all ranks.

    Returns:
        The same structure. Shape (n, ...) becomes (ranks * n, ...), and () becomes (ranks,).

    Raises:
        TypeError: something in the structure is not a tensor.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import gather
        >>> gather(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    return collectives.gather(tensor, group=_data_ranks())


def gather_object(object: Any) -> list[Any]:  # noqa: A002
    """Join the objects of all ranks in one list; all ranks call it.

    Ranks that hold one model together (tensor parallelism, pipelines) count as one.

    Args:
        object: a list or tuple of picklable objects, whose items are joined. Anything else, a
            string too, counts as one object.

    Returns:
        The objects, in order of the ranks.

    Example:
        >>> from notebook_accel import gather_object
        >>> gather_object(["a", "b"])
        ['a', 'b']
    """
    return collectives.gather_object(object, group=_data_ranks())


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine the tensors of all ranks, element by element; all ranks call it.

    Ranks that hold one model together (tensor parallelism, pipelines) count as one.

    Args:
        tensor: a tensor, or lists, tuples and mappings of tensors; the same shapes on all ranks.
        reduction: "sum", "mean", "max", "min", or "none", which returns ``tensor`` unchanged.
        scale: accepted without effect, as in Accelerate on everything but XLA.

    Returns:
        New tensors of the same shapes, the same on all ranks.

    Raises:
        TypeError: something in the structure is not a tensor.
        ValueError: ``reduction`` is unknown.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import reduce
        >>> reduce(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    return collectives.reduce(tensor, reduction, scale, group=_data_ranks())


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Pad the tensors of each rank to the largest size in ``dim`` on any rank; all ranks call it.

    Args:
        tensor: a tensor, or lists, tuples and mappings of tensors. All dimensions but ``dim`` are
            equal on all ranks. Tensors that have no dimension ``dim``, or are of torch's nested
            layout, are returned unchanged.
        dim: the dimension to pad.
        pad_index: the value to pad with.
        pad_first: pad at the start rather than at the end.

    Raises:
        TypeError: something in the structure is not a tensor.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import pad_across_processes
        >>> pad_across_processes(torch.ones(2, 3), dim=1).shape
        torch.Size([2, 3])
    """
    return collectives.pad_across_processes(tensor, dim, pad_index, pad_first, group=_data_ranks())
