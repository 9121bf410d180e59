"""A rank's standard streams: output and error go to its log file, and no input is read.

Descriptors 1 and 2 of a rank both lead to one append-only file. So the output of Python, C code and
child processes is in one place and in order, and is not lost if the agent or the notebook ends.

No person can type into a rank: ``input()``, ``pdb`` and ``breakpoint()`` raise an error that says
what to do instead. By themselves they would fail with an ``EOFError`` or ``BdbQuit``.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from notebook_accel.rank import this_rank
from notebook_accel.system import processes
from notebook_accel.system.own_files import FULL_DISK

# What else a disk says that is no doing of the function's: a limit (ulimit -f), damage, a network
# file system that is gone.
_LOST = (*FULL_DISK, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
_STREAMS = {"stdout": 1, "stderr": 2}
_INLINE = 'num_processes=1, engine="inline" (or run the cell without %%accelerate)'
_REMEDY = (
    "nobody can answer in a rank: pdb and input() work in the notebook's process alone. Launch "
    f"with {_INLINE}, and hand over as arguments what would be typed. After a launch with "
    "debug=True, or a cell of %%accelerate, %accelerate debug looks into the frames"
)
_AT_BREAKPOINT = (
    "breakpoint() ends the call in a rank: what stands after it has not run. A cell of "
    "%%accelerate opens the debugger there; after a launch with debug=True, %accelerate debug "
    f"does. To go on from there step by step, launch with {_INLINE}"
)


def redirect(fd: int, *, on_lost: Callable[[OSError], None]) -> None:
    """Redirect standard output and error of this process to ``fd``, line buffered; replace input.

    If PYTHONBREAKPOINT is set in the environment, ``breakpoint`` works as in any Python.
    """
    for number in (1, 2):
        os.dup2(fd, number)
    processes.line_buffer_c_output()
    for name in _STREAMS:
        _open_stream(name, on_lost)
    sys.stdin = sys.__stdin__ = _NoInput()  # type: ignore[misc, assignment]
    sys.breakpointhook = _breakpoint


def reopen_streams(on_lost: Callable[[OSError], None]) -> None:
    """Open ``sys.stdout`` and ``sys.stderr`` again if user code closed them or set them to None.

    Called at the start of each call: in a session, every later cell would fail without them.
    """
    for name in _STREAMS:
        stream = getattr(sys, name, None)
        if stream is None or getattr(stream, "closed", False):
            _open_stream(name, on_lost)


def report_warnings() -> None:
    """Report the warnings that this process shows from now on, beside what they print."""
    shown = warnings.showwarning

    def show(message: Any, category: Any, filename: str, *rest: Any, **others: Any) -> None:
        shown(message, category, filename, *rest, **others)
        this_rank.current().note_warning(f"{category.__name__}: {message}")

    # What is filtered or caught is not shown.
    warnings.showwarning = show


def _open_stream(name: str, on_lost: Callable[[OSError], None]) -> None:
    file = io.BufferedWriter(_LogFile(_STREAMS[name], on_lost))
    # Not the locale's encoding: whoever reads the file takes it for UTF-8.
    stream = io.TextIOWrapper(file, "utf-8", errors="replace", line_buffering=True)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


class _LogFile(io.FileIO):
    """A file whose writes do not raise if the disk is full or fails: the bytes are lost instead."""

    def __init__(self, fd: int, on_lost: Callable[[OSError], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._on_lost = on_lost
        self._is_lost = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _LOST:
                raise
            if not self._is_lost:
                self._is_lost = True
                self._on_lost(error)
        return memoryview(data).nbytes


class BreakpointError(RuntimeError):
    """Raised in a rank by ``breakpoint()``, since no person can use a debugger there."""


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    if "PYTHONBREAKPOINT" in os.environ:
        # Switched off ("0"), or a debugger of the person's own, which listens somewhere.
        return sys.__breakpointhook__(*args, **kwargs)
    raise BreakpointError(_AT_BREAKPOINT)


class _NoInput(io.TextIOBase):
    """The ``sys.stdin`` of a rank: reading raises a RuntimeError that says what to do instead."""

    def read(self, _size: int | None = -1) -> NoReturn:
        raise RuntimeError(_REMEDY)

    readline = read

    def readable(self) -> bool:
        return True
