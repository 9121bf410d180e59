"""The frames that an error has left in a rank, by the commands of pdb, one a call.

    notebook: a command that was typed --DebugCall--> rank: PostMortem.answer --> what pdb printed

Nothing runs on: the call that failed is over, and the ranks wait for the next one.
"""

from __future__ import annotations

import io
import linecache
import pdb
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.payload import cells
from notebook_accel.launch.worker import call
from notebook_accel.launch.worker.tracebacks import error_text, users_frames

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["PostMortem"]

_GOES_ON = (
    "nothing goes on here, the call is over: w, u, d, l, ll, a, p, pp look around, q leaves\n"
)


class PostMortem:
    """A debugger at the place where an error was raised."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._output = io.StringIO()
        self._debugger: _Debugger | None = None

    def describe(self) -> str:
        """The error in a line, and the line of code that raised it."""
        debugger = self._ready()
        self._output.write(f"{type(self._error).__name__}: {error_text(self._error)}\n")
        debugger.print_stack_entry(debugger.stack[debugger.curindex])
        return self._take_output()

    def answer(self, command: str) -> tuple[str, bool]:
        """What pdb prints for a command, and whether that command leaves the debugger."""
        debugger = self._ready()
        tracer = sys.gettrace()
        try:
            leaves = bool(debugger.onecmd(debugger.precmd(command)))
        except Exception as error:  # a command that reads from a terminal, a __repr__ that fails
            self._output.write(f"*** {type(error).__name__}: {error_text(error)}\n")
            leaves = False
        finally:
            # pdb's `debug` leaves its own, which would stop the rank in the next function it calls.
            sys.settrace(tracer)
        if leaves and not debugger.quitting:
            self._output.write(_GOES_ON)
            leaves = False
        if leaves:
            self._debugger = None
        return self._take_output(), leaves

    def _ready(self) -> _Debugger:
        if self._debugger is None:
            self._debugger = _Debugger(stdout=self._output, nosigint=True, readrc=False)
            self._debugger.reset()
            entry = users_frames(self._error, caller=call.__file__)
            self._debugger.setup(None, _without_ours(entry))
        return self._debugger

    def _take_output(self) -> str:
        text = self._output.getvalue()
        self._output.seek(0)
        self._output.truncate()
        return text


def _without_ours(entry: TracebackType | None) -> TracebackType | None:
    """A traceback without our frames at its end, as those of ``breakpoint()`` or ``prepare``."""
    entries = []
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    while len(entries) > 1 and _is_ours(entries[-1].tb_frame):
        entries.pop()
    made: TracebackType | None = None
    for one in reversed(entries):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return "__tracebackhide__" in frame.f_locals or module.startswith("notebook_accel.")


class _Debugger(pdb.Pdb):
    """Pdb, which calls a cell what a person calls it."""

    stack: Any = ()

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        frame, number = frame_lineno
        filename = frame.f_code.co_filename
        line = linecache.getline(filename, number, frame.f_globals).strip()
        return f"{cells.label_of(filename)}({number}){frame.f_code.co_name}(){lprefix}{line}"
