"""One name of the notebook on its way to a session: what it uses, and whether it has changed.

A value is pickled into nothing to see both. Of what it holds, tensors are compared by their
version, which torch counts, and not by their bytes: looking at a large model costs as little as
looking at a small one.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.payload.culprits import cannot_be_pushed, cause
from notebook_accel.launch.payload.pickling import Discard, SessionPickler, itself

if TYPE_CHECKING:
    import pickle

__all__ = ["NameFacts", "look_at"]

# Arrays know no version: up to this size their bytes are compared, above it where they lie.
_MAX_COMPARED_BYTES = 100_000_000
# What is written through an array of numpy on the memory of a tensor counts no version either.
_SMALL_STORAGE_BYTES = 1_000_000


@dataclass(frozen=True)
class NameFacts:
    """What a look at a value says.

    Attributes:
        digest: differs where the value has changed.
        names: of the notebook's globals that its functions and classes use.
        num_bytes: of the memory of its tensors and arrays.
    """

    digest: bytes
    names: frozenset[str]
    num_bytes: int


def look_at(name: str, value: object) -> NameFacts:
    """Look at the value that the notebook has under ``name``.

    Raises:
        LaunchError: it cannot travel; the message says what of it cannot, and what to do.
    """
    file = _Digest()
    with _LookingPickler(file) as pickler:
        try:
            pickler.dump(value)
        except (Exception, SystemExit) as error:  # whatever a user's object does to be pickled
            raise cannot_be_pushed(name, value, error) from cause(error)
        return NameFacts(file.digest(), frozenset(pickler.names), pickler.num_bytes)


class _Digest(Discard):
    """A file that keeps a digest of what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self._hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def digest(self) -> bytes:
        return self._hash.digest()


class _LookingPickler(SessionPickler):
    """Pickles in the place of memory what says whether it has changed.

    Attributes:
        num_bytes: of all memory that was seen.
    """

    def __init__(self, file: _Digest) -> None:
        super().__init__(file, self._take_buffer)
        self._digest = file
        self.num_bytes = 0

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self._note(buffer.raw(), _MAX_COMPARED_BYTES)

    def _reduce_storage(self, storage: Any) -> Any:
        import torch

        size = storage.nbytes()
        if storage.device.type == "cpu" and 0 < size <= _SMALL_STORAGE_BYTES:
            array = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
            self._note(memoryview(array.data), _SMALL_STORAGE_BYTES)
        else:
            self.num_bytes += size
        return itself, ((storage.data_ptr(), size),)

    def _reduce_tensor(self, tensor: Any) -> Any:
        # A tensor that was made in inference mode counts none.
        with contextlib.suppress(RuntimeError):
            self._digest.write(b"%d," % tensor._version)
        return super()._reduce_tensor(tensor)

    def _note(self, view: memoryview, limit: int) -> None:
        self.num_bytes += view.nbytes
        if view.nbytes <= limit:
            self._digest.write(b"%d," % zlib.crc32(view))
