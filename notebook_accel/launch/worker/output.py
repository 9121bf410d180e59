"""Where a rank's output goes.

Descriptors 1 and 2 of a rank are one append-only file: Python, C and child processes all write
to it, in order, and it outlives everybody who reads it.
"""

from __future__ import annotations

import os
import sys

from notebook_accel.launch.system import processes

__all__ = ["redirect"]


def redirect(fd: int) -> None:
    """Send all that this process prints to ``fd``, a line at a time."""
    for number in (1, 2):
        os.dup2(fd, number)
    processes.line_buffer_c_output()
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = open(number, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
