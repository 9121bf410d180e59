"""Results of a detached run, in files of the run's folder.

A detached run outlives the notebook's kernel; its keeper process writes each result when a rank
returns it (:meth:`StoredResults.keep`), and any kernel of the user reads it on demand. Each file
holds the buffers of a pickled result (``payload.Packed``), one after the other, preceded by a line
of JSON with the list of their sizes in bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from notebook_accel import wire
from notebook_accel.launch import payload
from notebook_accel.launch.control.results import Results
from notebook_accel.launch.control.run_folder import lost_files_notice
from notebook_accel.launch.payload.packets import unpack
from notebook_accel.system.own_files import own_file


class StoredResults(Results):
    """Results of a detached run, stored in its folder so that other processes can read them.

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

    def _read(self, rank: int) -> payload.Packed:
        """Read the result of a rank from the file that :meth:`keep` wrote, still pickled."""
        with open(self._path(rank), "rb", opener=own_file) as file:
            buffers = [bytearray(size) for size in json.loads(file.readline())]
            for buffer in buffers:
                if file.readinto(buffer) != len(buffer):
                    raise OSError(f"{file.name} is not all there")
        return payload.Packed(tuple(map(memoryview, buffers)))
