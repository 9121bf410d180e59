"""Collectives of torch_xla's ranks: of tensors, and of objects as bytes in tensors.

torch_xla compiles a graph for each shape. So bytes, whose length varies, are padded to a power of
two, so that few shapes occur.
"""

from __future__ import annotations

import pickle
import socket
from datetime import timedelta
from typing import Any

import torch

from notebook_accel.rank.group_store import store_of_next_group
from notebook_accel.rank.this_rank import StorePort
from notebook_accel.training.collectives.exchange import Exchange

# All ranks of a launch are on one machine.
_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(minutes=5)
_SMALLEST_BYTES = 1024


class XlaExchange(Exchange):
    """Collectives of the ranks of one ``xmp.spawn``, each a thread with a device of its own.

    Making one is a collective itself: all ranks make theirs together.
    """

    backend = "xla"

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        self._xm: Any = xm
        self.rank = int(xr.global_ordinal())
        self.size = int(xr.world_size())
        self.local_rank = int(xr.local_ordinal())
        self.local_size = int(xr.local_process_count() * xr.addressable_runtime_device_count())
        self.device: torch.device = torch_xla.device()
        self._store: Any = None
        if self.size > 1:
            # Made while every rank is here, and learns its port: whoever uses it waits for nobody.
            listener = socket.create_server((_LOOPBACK, 0)) if self.rank == 0 else None
            (port, *_) = self.gather_object(listener and listener.getsockname()[1])
            at = StorePort(_LOOPBACK, port, listener)
            self._store = store_of_next_group(self.rank, _STORE_TIMEOUT, at)

    def gather(self, leaf: torch.Tensor) -> torch.Tensor:
        gathered = self._xm.all_gather(_countable(self._sent(leaf)), dim=0)
        return gathered.to(leaf.dtype).to(leaf.device)  # type: ignore[no-any-return]

    def reduce(self, leaf: torch.Tensor, reduction: str) -> torch.Tensor:
        total: torch.Tensor = self._xm.all_reduce(reduction, self._sent(leaf))
        return total.to(leaf.device)

    def broadcast(self, leaf: torch.Tensor, source: int) -> None:
        sent = _countable(self._sent(leaf)).clone()
        self._xm.collective_broadcast([sent], root_ordinal=source)
        leaf.detach().copy_(sent.to(leaf.dtype))

    def gather_object(self, mine: Any) -> list[Any]:
        if self.size == 1:
            return [mine]
        data = pickle.dumps(mine)
        sizes = self.gather(torch.tensor([len(data)])).tolist()
        length = _SMALLEST_BYTES
        while length < max(sizes):
            length *= 2
        padded = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
        rows = self.gather(padded).reshape(self.size, length)
        return [
            pickle.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)
        ]

    def store(self) -> Any:
        assert self._store is not None, "a rank alone leaves no notes"
        return self._store

    def barrier(self) -> None:
        self.reduce(torch.zeros(1), "sum")  # on the host: it is waited for

    def _sent(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach().to(self.device)


def _countable(tensor: torch.Tensor) -> torch.Tensor:
    """Return booleans as uint8 (torch_xla gathers by sums), and other tensors unchanged."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
