"""Debug mode: compare what the ranks give to a collective before it runs.

Backends compare nothing. If the ranks' tensors differ in size or type, gloo kills a rank (SIGABRT),
NCCL waits for ever, and either may give wrong numbers. With ``debug=True`` of the launcher, or
``ACCELERATE_DEBUG_MODE``, the ranks first tell each other the shapes and types of their tensors,
which costs an additional collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from notebook_accel.rank.this_rank import current, has_process_group
from notebook_accel.training.collectives.exchange import exchange
from notebook_accel.training.collectives.nested import leaves_with_paths
from notebook_accel.training.settings import environment

# Where a rank keeps whether its code asked for debug mode.
ASKED = "debug mode"


class DistributedOperationException(ValueError):  # noqa: N818 (Accelerate's name)
    """The ranks gave tensors of different structures, shapes or types to a collective.

    Raised in debug mode only, on every rank.
    """


def is_debugging() -> bool:
    """Return whether debug mode is on: as ``set_debugging`` set it, or else by the environment."""
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
    """Raise if the ranks of a group have tensors of different shapes or types; all of them call it.

    Args:
        group: the ranks; None means all.
        free_dimension: a dimension whose size may differ; None: no dimension may.

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
    """Return a list with the object ``mine`` of each rank of a group; all of them call it."""
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
    """Return a text with a line for each kind of data: the ranks that have it, and what it is.

    The most common kind comes first.
    """
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, of_rank in enumerate(everywhere):
        ranks[", ".join(of_rank) or "nothing"].append(str(rank))
    lines = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return "\n".join(
        f"  rank{'s' * (len(having) > 1)} {', '.join(having)}: {kind}" for kind, having in lines
    )
