"""Files that others may have put there: in a shared folder, anything can have the name of a log."""

from __future__ import annotations

import os
import stat
from typing import IO, TYPE_CHECKING

from notebook_accel.config.file import not_too_large
from notebook_accel.launch.system.interrupts import held

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["open_regular", "read_regular"]

# A file of others may be a FIFO, whose opening waits for a writer.
_CAREFULLY = os.O_CLOEXEC | os.O_NONBLOCK


def open_regular(path: Path, *, follow: bool = False, write: bool = False) -> IO[bytes]:
    """Open a regular file that others may have put there.

    Args:
        path: where it is.
        follow: whether it may be a link.
        write: whether it is opened for writing, too; it keeps what it has.

    Raises:
        OSError: it is no regular file, or its rights do not allow it.
    """
    flags = _CAREFULLY | (os.O_RDWR if write else os.O_RDONLY) | (0 if follow else os.O_NOFOLLOW)

    def opener(name: str, _: int) -> int:
        return os.open(name, flags)

    # An interrupt after the descriptor is opened, and before the file object has it, would leave it
    # open for good.
    with held():
        file = open(path, "r+b" if write else "rb", opener=opener)  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no regular file")
    return file


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file, and not of a link.

    Raises:
        OSError: as :func:`open_regular`, and of a file that is too large.
    """
    with open_regular(path) as file:
        return not_too_large(file).read()
