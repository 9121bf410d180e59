"""How the agent follows the file with a rank's output."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FileTail"]

# What the agent passes on at once; anything older stays in the file.
_MAX_LIVE_BYTES = 32_768
_CHUNK_BYTES = 1 << 20
# Bytes of UTF-8 that no character begins with.
_CONTINUATION = bytes(range(0x80, 0xC0))


class FileTail:
    """Follows one growing file and gives the newest part of what was added.

    Attributes:
        position: bytes of the file before what the next :meth:`read` gives.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._rest = b""
        self.position = 0

    def read(self) -> tuple[str, int]:
        """The text added since the last call, and how many lines before it were left out."""
        data, skipped = self._rest, 0
        left = os.fstat(self.fileno()).st_size - self._file.tell()
        while left > 0 and (part := self._file.read(min(left, _CHUNK_BYTES))):
            left -= len(part)
            data, more = _newest(data + part)
            skipped += more
        data, self._rest = _whole_characters(data)
        self.position = self._file.tell() - len(self._rest)
        return data.decode(errors="replace"), skipped

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


def _newest(data: bytes) -> tuple[bytes, int]:
    """As many whole lines at the end as may be shown, and the number of those before them."""
    start = len(data) - _MAX_LIVE_BYTES
    if start <= 0:
        return data, 0
    cut = data.find(b"\n", start) + 1
    if not 0 < cut < len(data):
        # One line alone is longer: it begins with a whole character.
        cut = start + len(data[start:]) - len(data[start:].lstrip(_CONTINUATION))
    return data[cut:], data.count(b"\n", 0, cut)


def _whole_characters(data: bytes) -> tuple[bytes, bytes]:
    """``data`` cut before a UTF-8 character of which only the start is there."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (data[:-back], data[-back:]) if back < needed else (data, b"")
        if byte < 0x80:
            break
    return data, b""
