"""Results of the ranks of a run, and their training states if the run was stopped.

Each value is kept as its pickle until somebody asks for it, and as the object from then on.

While the run goes on its call and its handle share one :class:`Results`; once it has ended,
the handle alone holds it. So a result of gigabytes is freed with the last handle, while the lists
of runs and the views, which outlive handles, keep a ``Run`` without results.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import payload
from notebook_accel.launch.transport.segment import unpack

if TYPE_CHECKING:
    from notebook_accel.launch import wire

__all__ = ["Results"]


class Results:
    """Store of the values that ranks returned, pickled until they are asked for.

    Args:
        registry: the notebook's own objects, which results and exceptions refer to.

    Attributes:
        raised: what a rank in this very process raised.
        lost: a line for the person about each result that could not be kept.
    """

    raised: BaseException | None = None
    lost: tuple[str, ...] = ()

    def __init__(self, registry: payload.Registry) -> None:
        self._registry = registry
        self._lock = threading.RLock()
        self._packed: dict[int, payload.Packed] = {}
        self._values: dict[int, Any] = {}
        self._parts: dict[int, payload.Packed] = {}
        self._rescued: Any = None

    def keep(self, rank: int, packet: wire.Packet, fds: list[int]) -> None:
        """Keep the pickled result that a rank sent; closes the descriptors."""
        self._packed[rank] = unpack(packet, fds)

    def put(self, rank: int, value: object) -> None:
        """Keep the result of a rank in this very process, as the object that it is."""
        self._values[rank] = value

    def has(self, rank: int) -> bool:
        """Return whether a rank has a result, None included."""
        with self._lock:
            return rank in self._values or rank in self._packed

    def get(self, rank: int) -> Any:
        """Return the result of a rank; unpickled once, in the caller's thread.

        Raises:
            KeyError: it returned nothing (:meth:`has`).
            Exception: whatever its classes raise when they are remade here.
        """
        with self._lock:
            if rank not in self._values:
                packed = self._packed[rank]
                self._values[rank] = payload.unpack_result(packed, self._registry)
                del self._packed[rank]
            return self._values[rank]

    def clear(self) -> None:
        """Drop all results, before the ranks are started again."""
        with self._lock:
            self._packed.clear()
            self._values.clear()
            self._parts.clear()

    def keep_part(self, rank: int, packet: wire.Packet, fds: list[int]) -> None:
        """Keep a rank's part of the training state of a stopped run; closes the descriptors."""
        self._parts[rank] = unpack(packet, fds)

    @property
    def has_rescued(self) -> bool:
        """Whether ranks sent training state of a stopped run."""
        return bool(self._parts) or self._rescued is not None

    @property
    def rescued_bytes(self) -> int:
        """Size of the training state that ranks sent, as long as it is not unpickled."""
        packs = self._parts.values()
        return sum(buffer.nbytes for packed in packs for buffer in packed.buffers)

    def rescued(self) -> Any:
        """Return the training state put together from all ranks; None if none was sent.

        Raises:
            Exception: whatever its classes raise when they are remade here.
        """
        with self._lock:
            if self._parts:
                first, *others = (
                    payload.unpack_result(packed, self._registry)
                    for _, packed in sorted(self._parts.items())
                )
                self._rescued = first.join(others)
                self._parts.clear()
            return self._rescued

    def exception(self, pickled: bytes | None) -> BaseException | None:
        """Unpickle the exception that a rank raised; None if it does not unpickle."""
        if self.raised is not None:
            return self.raised
        return payload.unpack_exception(pickled, self._registry)
