"""Tensors that a forked process could not read, or would see change, copied to the host.

A fork has the parent's memory as it was, whatever the parent does to its own afterwards: what lies
there in plain memory needs no copy. What lies on an accelerator does, and what is shared between
processes. The copies are pinned where there is an accelerator, and used again by the next save:
pinning costs more than copying.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from notebook_accel.training.collectives.nested import recursively_apply

__all__ = ["HostCopies"]


def _stays_shared(value: torch.Tensor) -> bool:
    """Whether a fork goes on to see what the parent writes into a tensor on the host: one that
    processes share, or one in pinned memory, which the accelerator's driver maps."""
    return bool(value.is_shared()) or value.is_pinned()  # type: ignore[no-untyped-call]


class HostCopies:
    """Copies of one state after the other, in memory that each save uses again."""

    def __init__(self) -> None:
        self._buffers: list[torch.UntypedStorage] = []

    def begin(self) -> Staging:
        """The copies of one save; those of the save before are overwritten."""
        return Staging(self._buffers)


class Staging:
    """The copies of one save."""

    def __init__(self, buffers: list[torch.UntypedStorage]) -> None:
        self._buffers = buffers
        self._num_used = 0
        self._copied: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def copy(self, state: Any) -> Any:
        """``state`` with copies on the host in place of tensors that a fork could not read, or in
        which it would see later steps of the training.

        Tensors that share memory still do.
        """
        return recursively_apply(self._tensor, state)

    def finish(self) -> None:
        """Wait until all copies are there."""
        if self._copied and torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        loaded = sys.modules.get("torch.distributed.tensor")
        if loaded is not None and isinstance(value, loaded.DTensor):
            own = value.to_local()
            copied = self._tensor(own)
            # Not from_local: it would put the part back on the mesh's device.
            part: torch.Tensor = loaded.DTensor(copied, value._spec, requires_grad=False)
            return value if copied is own else part
        if value.device.type == "cpu" and not _stays_shared(value):
            return value
        value = value.detach()
        copy = torch.empty(0, dtype=value.dtype, device="cpu")
        copy.set_(self._storage(value), value.storage_offset(), value.shape, value.stride())
        return copy

    def _storage(self, value: torch.Tensor) -> torch.UntypedStorage:
        source = value.untyped_storage()
        key = value.device, source.data_ptr()
        if key not in self._copied:
            self._copied[key] = self._buffer(source.nbytes())
            self._copied[key].copy_(source, non_blocking=True)
        return self._copied[key]

    def _buffer(self, size: int) -> torch.UntypedStorage:
        index, self._num_used = self._num_used, self._num_used + 1
        if index < len(self._buffers) and self._buffers[index].nbytes() == size:
            return self._buffers[index]
        pinned = torch.accelerator.is_available()
        made = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._buffers[index : index + 1] = [made.untyped_storage()]
        return self._buffers[index]
