"""The standard input of a rank: there is none, and whoever reads it is told what to do instead.

Nobody sits at a rank. ``input()`` and ``pdb`` would read the end of a file there and fail with an
``EOFError`` or ``BdbQuit`` that says nothing.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

__all__ = ["BreakpointError", "install"]

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


class BreakpointError(RuntimeError):
    """A rank has called ``breakpoint()``."""


class _NoInput(io.TextIOBase):
    """A standard input that says so when somebody reads it."""

    def read(self, _size: int | None = -1) -> NoReturn:
        raise RuntimeError(_REMEDY)

    def readline(self, _size: int = -1) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(_REMEDY)

    def readable(self) -> bool:
        return True


def install() -> None:
    """Have ``input``, ``pdb`` and ``breakpoint`` say in this process what to do instead."""
    sys.stdin = sys.__stdin__ = _NoInput()  # type: ignore[misc, assignment]
    sys.breakpointhook = _breakpoint


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    if "PYTHONBREAKPOINT" in os.environ:
        # Switched off ("0"), or a debugger of the person's own, which listens somewhere.
        return sys.__breakpointhook__(*args, **kwargs)
    raise BreakpointError(_AT_BREAKPOINT)
