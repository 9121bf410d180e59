"""Replaces the standard input of a rank: reading it raises an error that says what to do instead.

No person can type into a rank. Without this module, ``input()`` and ``pdb`` would see an empty
input, and fail with an ``EOFError`` or ``BdbQuit`` that does not say why.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

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
    """Raised in a rank by ``breakpoint()``, since no person can use a debugger there."""


class _NoInput(io.TextIOBase):
    """The ``sys.stdin`` of a rank: reading raises a RuntimeError that says what to do instead."""

    def read(self, _size: int | None = -1) -> NoReturn:
        raise RuntimeError(_REMEDY)

    def readline(self, _size: int = -1) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(_REMEDY)

    def readable(self) -> bool:
        return True


def install() -> None:
    """Have ``input``, ``pdb`` and ``breakpoint`` raise helpful errors in this rank's process.

    If PYTHONBREAKPOINT is set in the environment, ``breakpoint`` works as in any Python.
    """
    sys.stdin = sys.__stdin__ = _NoInput()  # type: ignore[misc, assignment]
    sys.breakpointhook = _breakpoint


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    if "PYTHONBREAKPOINT" in os.environ:
        # Switched off ("0"), or a debugger of the person's own, which listens somewhere.
        return sys.__breakpointhook__(*args, **kwargs)
    raise BreakpointError(_AT_BREAKPOINT)
