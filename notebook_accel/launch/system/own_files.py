"""How the files of runs are opened, so that another user can put none in their place."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
