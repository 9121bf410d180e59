"""The requests that a notebook sends to the ranks of its session, and their answers.

    notebook: CellCall(...) --Session.call--> rank: request(**names) --> CellOutcome

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, ClassVar

from notebook_accel.launch.payload import cells
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.worker.tracebacks import error_text, users_frames
from notebook_accel.notebook.worker.shown_value import ShownValue
from notebook_accel.rank import this_rank


@dataclass(frozen=True, kw_only=True)
class NamesOutcome:
    """A rank's report on its variables, in answer to a request.

    Attributes:
        assigned: names bound to another object since its last report.
        uses: the globals that the code behind a name uses, where that may have changed.
        last_push: number of the newest call that pushed variables here; 0 for none.
    """

    assigned: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    uses: Mapping[str, frozenset[str]] = field(default_factory=dict)
    pulled: Mapping[str, Any] = field(default_factory=dict)
    last_push: int = 0


@dataclass(frozen=True, kw_only=True)
class CellOutcome(NamesOutcome):
    """A rank's answer to a cell; ``value`` is None where there is none, or the cell did not run."""

    value: ShownValue | None = None

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, str]:
        return {} if self.value is None else dict(self.value.data)

    def __repr__(self) -> str:
        return "None" if self.value is None else self.value.text


@dataclass(kw_only=True)
class NamesCall:
    """Assigns pushed variables on each rank and returns pulled ones; base class of the others.

    ``pull_from`` is one rank, None all; a rank takes names of ``fills`` only if it lacks them.
    """

    pull: tuple[str, ...] = ()
    pull_from: int | None = None
    fills: frozenset[str] = frozenset()

    def __call__(self, /, **names: Any) -> NamesOutcome:
        namespace = _rank_namespace()
        namespace.push(names, self.fills)
        return NamesOutcome(**self.report(namespace))

    def report(self, namespace: Any, mentions: Iterable[str] = ()) -> dict[str, Any]:
        """Return the fields of a :class:`NamesOutcome`; ``mentions`` as in ``Namespace.report``."""
        is_asked = self.pull_from in (None, this_rank.current().rank)
        report: dict[str, Any] = namespace.report(self.pull if is_asked else (), mentions)
        return report


@dataclass(kw_only=True)
class CellCall(NamesCall):
    """Runs a cell; all ranks get it, also those that do not run the cell.

    Attributes:
        text, source, first_line: the cell without its magic's line; whole; where the one begins.
        mentions: names that the cell may use.
        imports: modules used as attributes of packages; each rank imports them first.
        ranks: the ranks that run the cell; None for all.
        renews_group: after a failed call in which ranks left their process group.
    """

    text: str
    source: CellSource
    first_line: int
    label: str
    mentions: frozenset[str] = frozenset()
    imports: frozenset[str] = frozenset()
    ranks: frozenset[int] | None = None
    renews_group: bool = False
    _notebook_accel_no_script: ClassVar[str] = (
        "this run is a cell, which uses names of the session's processes. Run it with "
        "`%%accelerate --write script.py`, which writes the cells that it needs as a script"
    )

    def __post_init__(self) -> None:
        # What lines for the person call the function that a run calls.
        self.__name__ = self.label

    def __call__(self, /, **names: Any) -> CellOutcome:
        """Raises whatever the cell raises; the value is None where the cell did not run."""
        __tracebackhide__ = True
        namespace = _rank_namespace()
        namespace.push(names, self.fills)
        namespace.get_ready(self.mentions, renews_group=self.renews_group)
        namespace.import_modules(self.imports)
        value = None
        if self.ranks is None or this_rank.current().rank in self.ranks:
            value = namespace.shell.run(self.text, self.source, self.first_line)
        return CellOutcome(value=value, **self.report(namespace, self.mentions))


@dataclass(kw_only=True)
class FunctionCall(NamesCall):
    """A request that calls a function, for ``notebook_launcher(..., session=True)``."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mentions: frozenset[str] = frozenset()
    renews_group: bool = False
    _notebook_accel_no_script: ClassVar[str] = (
        "this function was called in the session's processes, whose names it may use. Launch it "
        "without session=True, and export that run"
    )

    def __post_init__(self) -> None:
        self.__name__ = getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, /, **names: Any) -> Any:
        """Raises whatever the function raises."""
        __tracebackhide__ = True
        namespace = _rank_namespace()
        namespace.push(names, self.fills)
        namespace.get_ready(self.mentions, renews_group=self.renews_group, function=self.function)
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
            kept.debugger = PostMortem(kept.error)
        if self.command is None:
            return DebugAnswer(kept.debugger.describe())
        return DebugAnswer(*kept.debugger.answer(self.command))


def _rank_namespace() -> Any:
    # A kernel imports this module too, and must not make a rank's shell of its own.
    from notebook_accel.notebook.worker.namespace import rank_namespace

    return rank_namespace()


# ---- the debugger of a rank

_GOES_ON = (
    "nothing goes on here, the call is over: w, u, d, l, ll, a, p, pp look around, q leaves\n"
)


class PostMortem:
    """A pdb debugger in a rank, whose commands come from its caller; the frame stays selected."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._output = io.StringIO()
        self._debugger: _Debugger | None = None

    def describe(self) -> str:
        debugger = self._ready()
        self._output.write(f"{type(self._error).__name__}: {error_text(self._error)}\n")
        debugger.print_stack_entry(debugger.stack[debugger.curindex])
        return self._take_output()

    def answer(self, command: str) -> tuple[str, bool]:
        """Return the output, and whether the debugger ended; ``continue`` resumes nothing."""
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
            from notebook_accel.launch.worker import main  # in a rank alone

            self._debugger = _Debugger(stdout=self._output, nosigint=True, readrc=False)
            self._debugger.reset()
            entry = users_frames(self._error, caller=main.__file__)
            self._debugger.setup(None, _without_ours(entry))
        return self._debugger

    def _take_output(self) -> str:
        text = self._output.getvalue()
        self._output.seek(0)
        self._output.truncate()
        return text


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
