"""How the agent reads new output of a rank, from the file that the rank prints into."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

# What the agent passes on at once; anything older stays in the file.
_MAX_LIVE_BYTES = 32_768
# Read at once of what a rank printed: a flood of gigabytes needs no more memory than this.
_CHUNK_BYTES = 1 << 20
# Bytes of UTF-8 that no character begins with.
_CONTINUATION = bytes(range(0x80, 0xC0))


# A program in a rank may cut the file short: `> /dev/stderr` opens it anew. To forbid that by the
# file's mode would make that line of the program fail (not for root). A pipe or a terminal between
# the rank and the file would lose what lies in it when the agent dies, and the order of the prints.
_ERASED = (
    "[notebook-accel] the output before this line was erased: something opened /dev/stdout or "
    "/dev/stderr with '>' (in a shell, '>>' and '>&2' keep it)\n"
)


# Stands before a line of which less is passed on than was printed.
_CUT = "[notebook-accel: a part of this line is in the rank's log only] "


class FileTail:
    """Follows a growing text file: each :meth:`read` returns the newest part of the added text.

    If the file was truncated, the next :meth:`read` starts at its beginning again, after a line
    that says so. If the file has grown beyond its old size again before that :meth:`read`, the
    truncation is not noticed.

    Attributes:
        start: offset in bytes at which the newest :meth:`read` began, skipped lines included.
        position: offset in bytes at which the next :meth:`read` begins.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        # The bytes of a character that is not whole yet.
        self._rest = b""
        self._is_within_line = False
        self.start = self.position = 0

    def skip(self) -> None:
        """Skip all that the file contains now, so that :meth:`read` gives only later text."""
        self.start = self.position = self._file.seek(0, os.SEEK_END)

    def read(self, *, final: bool = False) -> tuple[str, int]:
        """Return (text added since the last call, number of lines skipped before that text).

        Lines are skipped if more than 32 KiB were added: only the newest part is returned.

        Args:
            final: whether the output is complete. If so, an incomplete UTF-8 character at the end
                becomes a replacement character; else it waits for its remaining bytes.
        """
        size, before, skipped = os.fstat(self.fileno()).st_size, "", 0
        if size < self._file.tell():
            self._file.seek(0)
            self._rest, self.position = b"", 0
            before = "\n" * self._is_within_line + _ERASED
        self.start = self.position
        is_cut = False
        data, left = self._rest, size - self._file.tell()
        while left > 0 and (part := self._file.read(min(left, _CHUNK_BYTES))):
            left -= len(part)
            data, more, within_line = _newest(data + part)
            skipped += more
            is_cut = is_cut if within_line is None else within_line
        decoded, num_used = codecs.utf_8_decode(data, "replace", final)
        self._rest = data[num_used:]
        text = before + _CUT * is_cut + decoded
        self.position = self._file.tell() - len(self._rest)
        if text:
            self._is_within_line = not text.endswith("\n")
        return text, skipped

    def fileno(self) -> int:
        return self._file.fileno()


def _newest(data: bytes) -> tuple[bytes, int, bool | None]:
    """Cut ``data`` to its newest 32 KiB at most, from the start of a line where possible."""
    start = len(data) - _MAX_LIVE_BYTES
    if start <= 0:
        return data, 0, None
    cut = data.find(b"\n", start) + 1
    is_within_line = not 0 < cut < len(data)
    if is_within_line:
        # One line alone is longer: it begins with a whole character.
        cut = start + len(data[start:]) - len(data[start:].lstrip(_CONTINUATION))
    return data[cut:], data.count(b"\n", 0, cut), is_within_line
