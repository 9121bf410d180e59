"""The requests that a notebook sends to the ranks of its session, and their answers.

    notebook: CellCall(...) --Session.call--> rank: request(**names) --> RankAnswer

The notebook makes an instance of a request class, and each rank calls that instance. The arguments
of the call are the variables that the notebook pushes along. A rank answers with the changes of its
own variables.

``%accelerate debug`` sends a :class:`DebugCall` for each command of pdb that the user types. It
looks into the frames that an error has left in a rank, and cannot resume them: the failed call is
over, and the ranks wait for the next one.
"""

from __future__ import annotations

import io
import linecache
import pdb
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, ClassVar

from notebook_accel.launch.payload import cells
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.worker.tracebacks import error_text, users_frames
from notebook_accel.rank import this_rank


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """A rank's answer to a request: a report on its variables, and the value of a cell.

    Attributes:
        value: of a cell's last expression by MIME type, binary data in base64; None where there is
            none, or no cell ran.
        assigned: names bound to another object since its last report.
        last_push: number of the newest call that pushed variables here; 0 for none.
    """

    assigned: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    pulled: Mapping[str, Any] = field(default_factory=dict)
    last_push: int = 0
    value: Mapping[str, str] | None = None

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, str]:
        return dict(self.value or {})

    def __repr__(self) -> str:
        return "None" if self.value is None else self.value.get("text/plain", "")


@dataclass(kw_only=True)
class NamesCall:
    """Assigns pushed variables on each rank and returns pulled ones; base class of the others.

    ``pull_from`` is one rank, None all; a rank takes names of ``fills`` only if it lacks them.
    """

    pull: tuple[str, ...] = ()
    pull_from: int | None = None
    fills: frozenset[str] = frozenset()

    def __call__(self, /, **names: Any) -> RankAnswer:
        namespace = _rank_namespace()
        namespace.push(names, self.fills)
        return self.outcome(namespace)

    def outcome(self, namespace: Any, value: Any = None) -> RankAnswer:
        is_asked = self.pull_from in (None, this_rank.current().rank)
        return RankAnswer(value=value, **namespace.report(self.pull if is_asked else ()))


@dataclass(kw_only=True)
class CodeCall(NamesCall):
    """Base class of what runs code on the ranks.

    Attributes:
        uses_accelerator: whether the code, or what it calls, may use that name.
        renews_group: after a failed call in which ranks left their process group.
    """

    uses_accelerator: bool = False
    renews_group: bool = False

    def begin(self, names: Mapping[str, Any]) -> Any:
        namespace = _rank_namespace()
        namespace.push(names, self.fills)
        namespace.get_ready(self.uses_accelerator, renews_group=self.renews_group)
        return namespace


@dataclass(kw_only=True)
class CellCall(CodeCall):
    """Runs a cell; all ranks get it, also those that do not run the cell.

    Attributes:
        text, source, first_line: the cell without its magic's line; whole; where the one begins.
        imports: modules used as attributes of packages; each rank imports them first.
        ranks: the ranks that run the cell; None for all.
    """

    text: str
    source: CellSource
    first_line: int
    label: str
    imports: frozenset[str] = frozenset()
    ranks: frozenset[int] | None = None
    _notebook_accel_no_script: ClassVar[str] = (
        "this run is a cell, which uses names of the session's processes. Run it with "
        "`%%accelerate --write script.py`, which writes the cells that it needs as a script"
    )

    def __post_init__(self) -> None:
        # What lines for the person call the function that a run calls.
        self.__name__ = self.label

    def __call__(self, /, **names: Any) -> RankAnswer:
        """Raises whatever the cell raises; the value is None where the cell did not run."""
        __tracebackhide__ = True
        namespace = self.begin(names)
        for name in self.imports:
            # Where one fails, the cell fails as it uses it.
            with suppress(ImportError):
                import_module(name)
        value = None
        if self.ranks is None or this_rank.current().rank in self.ranks:
            value = namespace.shell.run(self.text, self.source, self.first_line)
        return self.outcome(namespace, value)


@dataclass(kw_only=True)
class FunctionCall(CodeCall):
    """A request that calls a function, for ``notebook_launcher(..., session=True)``."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _notebook_accel_no_script: ClassVar[str] = (
        "this function was called in the session's processes, whose names it may use. Launch it "
        "without session=True, and export that run"
    )

    def __post_init__(self) -> None:
        self.__name__ = getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, /, **names: Any) -> Any:
        """Raises whatever the function raises."""
        __tracebackhide__ = True
        self.begin(names)
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class DebugAnswer:
    """What the debugger printed, and whether the command ended it."""

    text: str
    is_over: bool = False


@dataclass(kw_only=True)
class DebugCall:
    """Runs a pdb command on the newest call's error; None describes it. ``rank=None`` is all."""

    command: str | None = None
    rank: int | None = None

    def __call__(self) -> DebugAnswer | None:
        """Return this rank's answer; None if another rank is asked or this rank has no error."""
        kept, number = this_rank.current().kept_error, this_rank.current().rank
        if kept is None or self.rank not in (None, number):
            return None
        if kept.debugger is None:
            kept.debugger = _debugger_of(kept.error)
        debugger = kept.debugger
        leaves, tracer = False, sys.gettrace()
        try:
            if self.command is None:
                debugger.stdout.write(f"{type(kept.error).__name__}: {error_text(kept.error)}\n")
                debugger.print_stack_entry(debugger.stack[debugger.curindex])
            else:
                leaves = bool(debugger.onecmd(debugger.precmd(self.command)))
        except Exception as error:  # a command that reads from a terminal, a __repr__ that fails
            debugger.stdout.write(f"*** {type(error).__name__}: {error_text(error)}\n")
        finally:
            # pdb's `debug` leaves its own, which would stop the rank in the next function it calls.
            sys.settrace(tracer)
        if leaves and not debugger.quitting:  # ``continue``, which resumes nothing
            debugger.stdout.write(_GOES_ON)
            leaves = False
        if leaves:
            kept.debugger = None
        text = debugger.stdout.getvalue()
        debugger.stdout.seek(0)
        debugger.stdout.truncate()
        return DebugAnswer(text, is_over=leaves)


def _rank_namespace() -> Any:
    # A kernel imports this module too, and must not make a rank's shell of its own.
    from notebook_accel.notebook.worker.namespace import rank_namespace

    return rank_namespace()


# ---- the debugger of a rank

_GOES_ON = (
    "nothing goes on here, the call is over: w, u, d, l, ll, a, p, pp look around, q leaves\n"
)


def _debugger_of(error: BaseException) -> _Debugger:
    """Return pdb in the frames of an error; its ``stdout`` keeps what it prints."""
    from notebook_accel.launch.worker import main  # in a rank alone

    made = _Debugger(stdout=io.StringIO(), nosigint=True, readrc=False)
    made.reset()
    made.setup(None, _without_ours(users_frames(error, caller=main.__file__)))
    return made


def _without_ours(entry: TracebackType | None) -> TracebackType | None:
    """Drop frames of this package at the end; keep at least one."""
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
    """Pdb that names the file of a cell's code ``Cell In[3]``, as tracebacks do."""

    stack: Any = ()

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        frame, number = frame_lineno
        filename = frame.f_code.co_filename
        line = linecache.getline(filename, number, frame.f_globals).strip()
        return f"{cells.label_of(filename)}({number}){frame.f_code.co_name}(){lprefix}{line}"
