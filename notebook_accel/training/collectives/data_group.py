"""The data group: which ranks read different samples, and which read the same samples.

A *share* is the part of the data that one rank reads. In plain data parallelism every rank reads a
share of its own. Where several ranks work on one copy of the model (tensor, context or pipeline
parallelism), they read the same share. When results are gathered, one rank of each share is
enough::

    rank            0  1  2  3         2 shares x 2 ranks that hold one model together
    index_of_rank   0  0  1  1         which share each rank reads
    group of rank 0 : ranks 0 and 2    one rank of each share, so that each sample counts once
    group of rank 1 : ranks 1 and 3

The public collectives, such as ``notebook_accel.utils.gather``, work over the data group of this
rank's newest ``Accelerator``, as its methods do. The functions in ``collectives``, which the rest
of ``training`` uses, work over all ranks unless they are given a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from notebook_accel.rank.this_rank import current
from notebook_accel.training import collectives


@dataclass(frozen=True)
class DataGroup:
    """Which share (part) of the data each rank reads, and a group with one rank of each share.

    Ranks that hold one model together read the same share. Each rank has its own ``DataGroup``,
    and that of its newest ``Accelerator`` in ``current().shared``.
    """

    size: int
    """Number of shares into which the data is divided."""

    index: int
    """Which share this rank reads."""

    index_of_rank: tuple[int, ...]
    """Which share each rank of the whole world reads."""

    process_group: dist.ProcessGroup | None = None
    """One rank of each share, this one among them, in the order of the shares; None for the
    default group, which holds every rank."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group cannot leave its process. Loaders are pickled, and need only the numbers.
        return DataGroup, (self.size, self.index, self.index_of_rank)

    @classmethod
    def of_all_ranks(cls, num_ranks: int, rank: int) -> DataGroup:
        """Return the data group in which every rank reads a share of its own."""
        return cls(size=num_ranks, index=rank, index_of_rank=tuple(range(num_ranks)))

    @classmethod
    def of(cls, mesh: DeviceMesh | None, num_ranks: int, rank: int) -> DataGroup:
        """Return the data group of a mesh if there is one, else that of all ranks."""
        return cls.of_all_ranks(num_ranks, rank) if mesh is None else cls.of_mesh(mesh, rank)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, rank: int, *, makes_group: bool = False) -> DataGroup:
        """Return the data group of a device mesh, from its dimensions whose names begin with "dp".

        Ranks that differ in one of these dimensions read different shares; ranks that differ only
        in others read the same share.

        Args:
            makes_group: whether to make the process group, too; all ranks then call this together.
                If False, ``process_group`` is None.
        """
        names = mesh.mesh_dim_names or ()
        data = [dimension for dimension, name in enumerate(names) if name.startswith("dp")]
        others = [dimension for dimension in range(len(names)) if dimension not in data]
        num_shares = math.prod(mesh.mesh.shape[dimension] for dimension in data)
        shares = mesh.mesh.permute(*data, *others).reshape(num_shares, -1)  # a row each
        index_of = {each: index for index, row in enumerate(shares.tolist()) for each in row}
        group: dist.ProcessGroup | None = None
        if makes_group and num_shares < len(index_of):  # else every rank has a share of its own
            group, _ = dist.new_subgroups_by_enumeration(shares.T.tolist())  # type: ignore[no-untyped-call]
        return cls(
            size=num_shares,
            index=index_of[rank],
            index_of_rank=tuple(index_of[each] for each in sorted(index_of)),
            process_group=group,
        )


def _data_ranks() -> dist.ProcessGroup | None:
    found: DataGroup | None = current().shared.get(DataGroup)
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
