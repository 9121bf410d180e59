"""How much memory is free: on the host, and in the container of this process."""

from __future__ import annotations

from pathlib import Path

import psutil

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
