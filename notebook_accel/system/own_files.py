"""How the files of runs are opened, so that another user can put none in their place.

The log file of a rank, which has all its output, is in the folder of its run, or on a machine that
does not see this folder in one of the machine's agent (``launch/agent``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

# What the system says of a disk, or a user's share of it, that has no room left.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def own_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file of this user, never a link; the ``opener`` of ``open``.

    A new file is for its owner alone.

    Raises:
        OSError: the file cannot be opened, is of another kind, or belongs to another user.
    """
    # Non-blocking: to open a FIFO would wait for its other end.
    added = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags | added, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"{os.fspath(path)} is not a regular file of this user")
    os.set_blocking(fd, True)
    return fd


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, all for their owner alone.

    Raises:
        OSError: one of them cannot be made.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            with contextlib.suppress(FileExistsError):  # another process made it meanwhile
                folder.mkdir(mode=0o700)


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a folder in which no other user can replace what this user makes.

    It belongs to this user or root, and others cannot write it unless it has the sticky bit.

    Raises:
        OSError: there is no such folder, or others could replace what is in it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"it belongs to another user (uid {found.st_uid}), who could replace what is in it"
            )
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(
                "other users can write it, and so replace what is in it (`chmod go-w "
                f"{path}` ends that)"
            )
        yield fd
    finally:
        os.close(fd)


def log_path(log_dir: str | Path, rank: int) -> Path:
    """Return the path of the file with all output of a rank."""
    return Path(log_dir) / f"rank-{rank}.log"


def open_log(log_dir: str | Path, rank: int) -> int:
    """Return a descriptor for appending to a rank's log file; make the file if it is missing."""
    # O_APPEND: all processes below the rank write to it, and none may overwrite another's lines.
    return own_file(log_path(log_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def open_to_read(log_dir: str | Path, rank: int) -> IO[bytes]:
    """Open a rank's log file."""
    # Resolved: a call of a session may have a link (RunFolder.link_logs).
    return open(log_path(log_dir, rank).resolve(), "rb", opener=own_file)
