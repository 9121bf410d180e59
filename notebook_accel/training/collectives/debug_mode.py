"""Debug mode: what the ranks give to a collective is compared before it.

Backends compare nothing. Of tensors of different sizes or types gloo kills a rank (SIGABRT), NCCL
waits for ever, and either may give wrong numbers. With ``debug=True`` of the launcher, or
``ACCELERATE_DEBUG_MODE``, the ranks first tell each other what they have, which costs a collective
of its own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_accel.launch.rank import current, has_process_group
from notebook_accel.training.collectives.exchange import exchange
from notebook_accel.training.collectives.nested import leaves_with_paths
from notebook_accel.training.settings import environment

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DistributedOperationException",
    "ASKED",
    "is_debugging",
    "objects_of_ranks",
    "require_agreement",
]

# Where a rank keeps whether its code asked for debug mode.
ASKED = "debug mode"


class DistributedOperationException(ValueError):  # noqa: N818 (Accelerate's name)
    """Ranks gave tensors to a collective that do not go together."""


def is_debugging() -> bool:
    """Whether collectives compare what they are given, as the code or else the environment asks."""
    asked: bool | None = current().shared.get(ASKED)
    if asked is not None:
        return asked
    return environment.read_flag("DEBUG") or environment.read_flag("DEBUG_MODE")


def require_agreement(
    operation: str,
    data: Any,
    group: dist.ProcessGroup | None,
    *,
    free_dimension: int | None = None,
) -> None:
    """Raise if the ranks of a group have different data; all of them call it.

    Args:
        operation: what the error calls the collective.
        data: tensors, in any nesting; of anything else the type alone counts.
        group: the ranks; None for all.
        free_dimension: the dimension in which tensors may differ.

    Raises:
        DistributedOperationException: structures, shapes or types differ; raised on every rank.
    """
    mine = [
        f"{path} {_describe(leaf, free_dimension)}".lstrip()
        for path, leaf in leaves_with_paths(data, "")
    ]
    everywhere = objects_of_ranks(mine, group)
    if any(of_rank != everywhere[0] for of_rank in everywhere):
        raise DistributedOperationException(
            f"{operation} was given different tensors by different ranks:\n{_by_rank(everywhere)}\n"
            "Expected the same structure, shapes and types on every rank: pad tensors whose sizes "
            "differ (pad_across_processes), or gather_object what is no tensor"
        )


def objects_of_ranks(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return a list with the object of each rank of a group; all of them call it."""
    if not has_process_group():
        return exchange().gather_object(mine)
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, mine, group=group)
    return everywhere


def _describe(leaf: Any, free_dimension: int | None) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    sizes = [str(size) for size in leaf.shape]
    if free_dimension is not None and -leaf.ndim <= free_dimension < leaf.ndim:
        sizes[free_dimension] = "any"
    return f"{str(leaf.dtype).removeprefix('torch.')} ({', '.join(sizes)})"


def _by_rank(everywhere: Sequence[Sequence[str]]) -> str:
    """A line for each kind of data, with the ranks that have it; the most common kind first."""
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, of_rank in enumerate(everywhere):
        ranks[", ".join(of_rank) or "nothing"].append(str(rank))
    lines = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return "\n".join(
        f"  rank{'s' * (len(having) > 1)} {', '.join(having)}: {kind}" for kind, having in lines
    )
