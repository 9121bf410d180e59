"""What a process may still take: open files, memory of the host and of its container, turns.

A launch raises the soft limit of the kernel, but not to the hard limit: some programs that the
user's code may start close every possible descriptor, one by one. An agent, the process that starts
and watches ranks, raises its own soft limit to its hard limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from notebook_accel.errors import LaunchError

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)

# Of an agent, for each rank: its channel, log, pidfd, dump of stacks, eventfd and multiprocessing's
# sentinel; gloo's mesh is in the ranks.
_FILES_A_RANK = 6
_FILES_BESIDE = 64
# Of a kernel, whose soft limit may be 1,024 or less; and what a launch opens there.
_FILES_OF_KERNEL = 65_536
_FILES_OF_LAUNCH = 24


def files_needed(world_size: int) -> int:
    """Return about how many open files an agent needs to start ``world_size`` ranks."""
    return _FILES_BESIDE + _FILES_A_RANK * world_size


def hard_limit() -> int | None:
    """Return the hard limit of open files of this process; None for no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def raise_limit(most: int | None = None) -> None:
    """Raise this process's soft limit of open files to ``most``, but not above the hard limit.

    None stands for the hard limit. If the soft limit is higher than ``most`` already, it stays as
    it is. If the system refuses, no error is raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_free = hard == resource.RLIM_INFINITY
    wanted = hard if most is None or (hard < most and not is_free) else most
    if soft != resource.RLIM_INFINITY and (wanted > soft or wanted == resource.RLIM_INFINITY):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def too_many_files() -> LaunchError:
    """Return an error for a kernel with too many open files, with the limit and what to do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LaunchError(
        f"the notebook's kernel has too many files open: its limit is {soft} (ulimit -n). Close "
        "files and runs that are no longer needed, restart the kernel, or have the limit raised "
        "where Jupyter is started"
    )


@contextlib.contextmanager
def naming_what_is_short() -> Iterator[None]:
    """Turn an ``OSError`` of a block that starts processes into an error that says what to do."""
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


def check_open_files() -> None:
    """Raise the limit of open files, and check that a launch can still open its own."""
    raise_limit(_FILES_OF_KERNEL)
    numbers: list[int] = []
    try:
        with naming_what_is_short():
            # On an error the list has those before it.
            numbers.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(_FILES_OF_LAUNCH))
    finally:
        for number in numbers:
            os.close(number)


# ---- memory --------------------------------------------------------------------------

_GROUP = Path("/sys/fs/cgroup")
# More than any machine has.
_UNLIMITED = 1 << 62


def free_memory() -> int:
    """Return how many more bytes of memory this machine's processes may take."""
    return min(psutil.virtual_memory().available, free_in_container())


def free_in_container() -> int:
    """Return how many more bytes of memory this process's container (control group) may take.

    If the container has no limit of memory, it returns more than any machine has.
    """
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = int((_GROUP / "memory.current").read_text())
        fields = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return _UNLIMITED
    # The system gives the file cache up when memory is short.
    used -= int(fields.get("inactive_file", 0))
    return int(limit) - used if limit.isdecimal() else _UNLIMITED


# ---- how often something may happen ----------------------------------------------------------


class TokenBucket:
    """Limits a rate: each action takes tokens out of a bucket, which fills up again with time."""

    def __init__(self, capacity: int, per_second: float) -> None:
        self._capacity = capacity
        self._per_second = per_second
        self._tokens = float(capacity)
        self._filled_at = time.monotonic()

    def available(self) -> int:
        now = time.monotonic()
        gained = (now - self._filled_at) * self._per_second
        self._tokens = min(self._capacity, self._tokens + gained)
        self._filled_at = now
        return int(self._tokens)

    def take(self, number: int = 1) -> None:
        """Take tokens, even more than there are: the number of tokens is then negative."""
        self._tokens -= number

    def try_take(self) -> bool:
        """Take one token if there is one; return whether a token was taken."""
        if self.available() < 1:
            return False
        self.take()
        return True
