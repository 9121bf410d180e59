"""Looks at a notebook variable that a session may need: what it uses, and whether it has changed.

A session is a group of ranks that stay alive between cells. Before a cell runs in the session, the
notebook sends the variables that have changed. To find these, each variable is pickled into a hash,
and the pickle is not stored. Arrays are compared by all of their bytes, which takes up to a second
for each gigabyte. Large tensors are compared by torch's count of in-place changes, by their
address, and, on the CPU, by a sample of their bytes, so that a large model costs little more than a
small one.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from notebook_accel.launch.payload.culprits import cannot_be_pushed, pickled
from notebook_accel.launch.payload.pickling import Discard, SessionPickler, itself, memory_of
from notebook_accel.private import of_torch

# What is written through `tensor.data`, or through an array of numpy on the memory of a tensor,
# counts no version. Up to this size all of the memory on the CPU is compared. Above it samples of
# it are, which see what changes all of it (a moving average of weights), but maybe not one element.
_SMALL_STORAGE_BYTES = 1_000_000
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1_024


@dataclass(frozen=True)
class NameFacts:
    """Facts about a notebook variable: a digest of its value, the names it uses, its size."""

    digest: bytes
    names: frozenset[str]
    num_bytes: int


def look_at(name: str, value: object) -> NameFacts:
    """Return the facts about a notebook variable."""

    def look() -> NameFacts:
        file = _Digest()
        pickler = _LookingPickler(file)
        pickler.dump(value)
        return NameFacts(file.digest(), frozenset(pickler.names), pickler.num_bytes)

    return pickled(look, partial(cannot_be_pushed, name, value))


def names_used(value: object) -> frozenset[str]:
    """Return the names of the globals that functions and classes in ``value`` use."""
    pickler = SessionPickler(Discard(), lambda _buffer: None)  # reads no memory of arrays
    pickler.dump(value)
    return frozenset(pickler.names)


class _Digest(Discard):
    """A file that stores nothing and computes a hash of all that is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self._hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def digest(self) -> bytes:
        return self._hash.digest()


class _LookingPickler(SessionPickler):
    """Pickles a value into a digest, without the memory of its tensors and arrays.

    Checksums of that memory, and the tensors' change counts and addresses, go into the digest
    instead: these suffice to see whether the value has changed.
    """

    def __init__(self, file: _Digest) -> None:
        super().__init__(file, self._take_buffer)
        self._digest = file
        self.num_bytes = 0

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> None:
        # Arrays know no version: an array that was written to is told by its bytes alone.
        view = buffer.raw()
        self.num_bytes += view.nbytes
        self._digest.write(b"%d," % zlib.crc32(view))

    def _reduce_storage(self, storage: Any) -> Any:
        size = storage.nbytes()
        self.num_bytes += size
        if storage.device.type == "cpu" and size:
            array = memory_of(storage)
            is_small = size <= _SMALL_STORAGE_BYTES
            length, step = (size, size) if is_small else (_SAMPLE_BYTES, size // _NUM_SAMPLES)
            for start in range(0, size, step):
                self._digest.write(b"%d," % zlib.crc32(array.data[start : start + length]))
        return itself, ((storage.data_ptr(), size),)

    def _reduce_tensor(self, tensor: Any) -> Any:
        # A tensor that was made in inference mode has no count of its changes.
        with contextlib.suppress(RuntimeError):
            self._digest.write(b"%d," % of_torch.count_of_changes(tensor))
        return super()._reduce_tensor(tensor)
