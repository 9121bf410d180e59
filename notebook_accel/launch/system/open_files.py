"""How many files a process may have open: the limit, what a launch needs of it, and its error.

The kernel's limit is raised only as far as it must be, since the user's code lives there; that of
an agent as far as it may be.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from typing import TYPE_CHECKING

from notebook_accel.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "TOO_MANY_FILES",
    "check_open_files",
    "files_needed",
    "hard_limit",
    "make_room",
    "naming_what_is_short",
    "raise_to_hard_limit",
    "too_many_files",
]

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)

# Of an agent, for each rank: its channel, log, pidfd, dump of stacks, eventfd and multiprocessing's
# sentinel; gloo's mesh is in the ranks.
_FILES_A_RANK = 6
_FILES_BESIDE = 64


def files_needed(world_size: int) -> int:
    """Files that the agent of so many ranks has open, about."""
    return _FILES_BESIDE + _FILES_A_RANK * world_size


def hard_limit() -> int | None:
    """Files that a process of this user may have open at most; None for no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def raise_to_hard_limit() -> None:
    """Let this process open as many files as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def too_many_files() -> LaunchError:
    """The error that names the limit, and what to do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LaunchError(
        f"the notebook's kernel has too many files open: its limit is {soft} (ulimit -n). Close "
        "files and runs that are no longer needed, restart the kernel, or have the limit raised "
        "where Jupyter is started"
    )


def check_open_files(needed: int) -> None:
    """See that this process can open so many more files; raises its own limit where it must.

    Raises:
        LaunchError: it can open fewer than ``needed``, and its limit cannot be raised.
    """
    while not _can_open(needed):
        if not _raise_limit(needed):
            raise too_many_files()


def make_room(needed: int) -> None:
    """Raise this process's limit where it has no room for so many files more, as far as it may."""
    with contextlib.suppress(LaunchError):
        check_open_files(needed)


def _can_open(needed: int) -> bool:
    numbers: list[int] = []
    try:
        # By trying: where none is left, /proc/self/fd cannot be listed either. The first is copied,
        # which takes a fifth of the time of opening it once more: a session's calls ask each time.
        numbers.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(needed - 1):
            # One by one, so that where an open fails the list has those before it, which are closed
            # below.
            numbers.append(os.dup(numbers[0]))
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            return False
        raise
    finally:
        for number in numbers:
            os.close(number)
    return True


def _raise_limit(needed: int) -> bool:
    """Raise this process's soft limit towards the hard one; False where that is reached.

    No further than is needed: code that calls select(2) breaks with descriptors above 1,023.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + needed if hard == resource.RLIM_INFINITY else min(soft + needed, hard)
    if wanted <= soft:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return False
    return True


@contextlib.contextmanager
def naming_what_is_short() -> Iterator[None]:
    """What the system refuses while processes are started is an error that says what to do.

    Raises:
        LaunchError: in place of an ``OSError`` of the block.
    """
    try:
        yield
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise too_many_files() from None
        raise LaunchError(
            f"the system refused what starting the ranks needs: {error}. Most likely memory, "
            "processes (`ulimit -u`) or room in the folder for temporary files have run out: free "
            "some, then launch again"
        ) from error
