"""The limit of open files of the notebook's own process, which a leaky notebook reaches."""

from __future__ import annotations

import errno
import os
import resource

from notebook_accel.errors import LaunchError

__all__ = ["TOO_MANY_FILES", "check_open_files", "too_many_files"]

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def too_many_files() -> LaunchError:
    """The error that names the limit, and what to do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LaunchError(
        f"the notebook's kernel has too many files open: its limit is {soft} (ulimit -n). Close "
        "files and runs that are no longer needed, restart the kernel, or have the limit raised "
        "where Jupyter is started"
    )


def check_open_files(needed: int) -> None:
    """Refuse a launch for which this process cannot open files enough.

    Raises:
        LaunchError: it can open fewer than ``needed``.
    """
    numbers: list[int] = []
    try:
        # By trying: where none is left, /proc/self/fd cannot be listed either.
        for _ in range(needed):
            # In a list so far where it fails, which closes them: no list.extend.
            numbers.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise too_many_files() from None
        raise
    finally:
        for number in numbers:
            os.close(number)
