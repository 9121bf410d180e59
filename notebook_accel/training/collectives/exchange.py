"""Collectives of ranks that have no process group of torch.

The base class stands for a single rank, which has nobody to communicate with. For ranks that
another library connects (torch_xla), there is a derived class, and the functions of ``collectives``
use its methods.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from notebook_accel.rank.this_rank import current

_KEY = "exchange without a process group"


class Exchange:
    """Collectives without a process group: here of a single rank.

    All ranks call all but ``store`` and ``show``.
    """

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    backend: str | None = None

    def gather(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, of one shape, joined along the first dimension."""
        return leaf

    def reduce(self, leaf: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the "sum", "max" or "min" of the tensors of all ranks, element by element."""
        return leaf

    def broadcast(self, leaf: torch.Tensor, source: int) -> None:
        """Fill ``leaf`` in place with the tensor of the rank ``source``."""

    def gather_object(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, in order of the ranks."""
        return [mine]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def store(self) -> Any:
        """Return a key-value store that all ranks reach; here, that of torch's process group.

        Ranks with a process group call this too, since joint saves need the store.
        """
        return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]

    def show(self) -> None:
        """Make :func:`exchange` return this object, on this rank."""
        current().shared[_KEY] = self


_ALONE = Exchange()


def exchange() -> Exchange:
    """Return the collectives that this rank uses if it has no process group."""
    found: Exchange = current().shared.get(_KEY, _ALONE)
    return found
