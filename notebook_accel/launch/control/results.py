"""Results that the ranks of a run returned, and their training states if the run was stopped.

Each value is kept as its pickle until it is asked for, and as the unpickled object from then on.

While the run goes on, its call and its handle share one :class:`Results`; once the run has ended,
only the handle refers to it. So a result of gigabytes is freed with the user's last handle. The
list of runs and the views, which live longer, keep a ``Run`` without results; but what nobody has
read when the handle is gone, the list keeps until the next launch.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from notebook_accel import wire
from notebook_accel.launch import payload
from notebook_accel.launch.control.run_folder import lost_files_notice
from notebook_accel.launch.payload import Packed, unpack
from notebook_accel.system.own_files import own_file


class Results:
    """Store of the values that ranks returned, pickled until they are asked for.

    Attributes:
        parts: of the training state of a stopped run, by rank, until :meth:`rescued` joins them.
        raised: with ``engine="inline"``, whose rank is this process, the exception object that the
            function raised; else None.
    """

    raised: BaseException | None = None
    lost: tuple[str, ...] = ()
    was_read = False

    def __init__(self, registry: payload.Registry) -> None:
        self._registry = registry
        self._lock = threading.RLock()
        self._packed: dict[int, Packed] = {}
        self._values: dict[int, Any] = {}
        self.parts: dict[int, Packed] = {}
        self._rescued: Any = None
        self._used: set[int] = set()

    def keep(self, rank: int, packet: wire.Packet, fds: list[int]) -> None:
        self._packed[rank] = self.unpacked(packet, fds)

    def put(self, rank: int, value: object) -> None:
        """Keep the result of a rank that runs in this process, unpickled (``engine="inline"``)."""
        self._values[rank] = value

    def has(self, rank: int) -> bool:
        with self._lock:
            return rank in self._values or rank in self._packed

    def get(self, rank: int) -> Any:
        """Return the result of a rank; the first call unpickles it, in the caller's thread.

        Raises:
            KeyError: there is no result of this rank (:meth:`has`).
        """
        self.was_read = True
        with self._lock:
            if rank not in self._values:
                packed = self._packed[rank]
                self._values[rank] = payload.unpack_result(packed, self._registry)
                del self._packed[rank]
            return self._values[rank]

    def clear(self) -> None:
        """Drop all results and training states, before the ranks are started again."""
        with self._lock:
            self._packed.clear()
            self._values.clear()
            self.parts.clear()

    def unpacked(self, packet: wire.Packet, fds: list[int]) -> Packed:
        packed = unpack(packet, fds)
        self._used.update(payload.numbers_in(packed))
        return packed

    def end_call(self) -> None:
        """Note that no more comes: what is here may contain few of the notebook's objects."""
        held = self._registry.held
        self._registry.held = {number: held[number] for number in self._used if number in held}

    @property
    def has_rescued(self) -> bool:
        """Whether ranks sent their training state, as they do when the run is stopped."""
        return 0 in self.parts or self._rescued is not None

    @property
    def rescued_bytes(self) -> int:
        """Size in bytes of the pickled training state; 0 once :meth:`rescued` has unpickled it."""
        packs = self.parts.values()
        return sum(buffer.nbytes for packed in packs for buffer in packed.buffers)

    def rescued(self) -> Any:
        """Return the training state (a ``Rescued``) of a stopped run; None if no rank sent any.

        The first call unpickles the parts of all ranks, and joins them.
        """
        with self._lock:
            if self.parts:
                first, *others = (
                    payload.unpack_result(packed, self._registry)
                    for _, packed in sorted(self.parts.items())
                )
                self._rescued = first.join(others)
                self.parts.clear()
            return self._rescued

    def exception(self, pickled: bytes | None) -> BaseException | None:
        """Return the exception that a rank raised; None if none was sent or unpickling it fails.

        Args:
            pickled: the exception as the rank sent it; None if the rank sent none. Not used for
                ``engine="inline"``, whose exception is in :attr:`raised`.
        """
        if self.raised is not None:
            return self.raised
        return payload.unpack_exception(pickled, self._registry)


class StoredResults(Results):
    """Results of a detached run, stored in its folder so that other processes can read them.

    The run's keeper writes each result when a rank returns it, and any kernel of the user reads it
    on demand. Each file holds the buffers of a pickled result (``payload.Packed``), one after the
    other, preceded by a line of JSON with the list of their sizes in bytes.

    Where a result in :class:`Results` refers to objects of the notebook that launched the run, a
    stored result has copies of them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(payload.Registry())
        self._folder = folder

    def _path(self, rank: int) -> Path:
        return self._folder / f"result-{rank}.pickle"

    def keep(self, rank: int, packet: wire.Packet, fds: list[int]) -> None:
        packed = unpack(packet, fds)
        part = self._path(rank).with_suffix(".part")
        try:
            with open(part, "wb", opener=own_file) as file:
                file.write(json.dumps([one.nbytes for one in packed.buffers]).encode() + b"\n")
                file.writelines(packed.buffers)
            part.replace(self._path(rank))
        except OSError as error:
            what = f"what rank {rank} returned is lost"
            self.lost = (*self.lost, lost_files_notice(what, self._folder, error))
            part.unlink(missing_ok=True)

    def has(self, rank: int) -> bool:
        return rank in self._values or self._path(rank).exists()

    def get(self, rank: int) -> Any:
        with self._lock:
            if rank not in self._values and rank not in self._packed:
                self._packed[rank] = self._read(rank)
            return super().get(rank)

    def _read(self, rank: int) -> Packed:
        """Read the result of a rank from the file that :meth:`keep` wrote, still pickled."""
        with open(self._path(rank), "rb", opener=own_file) as file:
            buffers = [bytearray(size) for size in json.loads(file.readline())]
            for buffer in buffers:
                if file.readinto(buffer) != len(buffer):
                    raise OSError(f"{file.name} is not all there")
        return Packed(tuple(map(memoryview, buffers)))
