"""The log file of each rank, which has all its output: its path, and how it is opened.

A log file is in the folder of its run; ``control/run_folder.py`` makes, lists and removes these
folders. On a machine that does not see the run's folder, the log file is in a folder of the
machine's agent (``agent/logs.py``).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

from notebook_accel.launch.system.own_files import own_file

# What the system says of a disk, or a user's share of it, that has no room left.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


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
