"""What a notebook asks of the ranks of its session: each request is called on every rank.

    notebook: CellCall(...) --Session.call--> rank: request(**names) --> CellOutcome

A request is sent as an instance of its class; the names that the notebook pushes along are the
arguments of its call. Each rank answers with what changed among its names.

``%accelerate debug`` looks into the frames that an error has left in a rank, by the commands of
pdb, one a call. Nothing runs on: the call that failed is over, and the ranks wait for the next one.
"""

from __future__ import annotations

import io
import linecache
import pdb
import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_accel.launch import rank
from notebook_accel.launch.payload import cells
from notebook_accel.launch.worker.tracebacks import error_text, users_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

    from notebook_accel.launch.payload import CellSource

__all__ = [
    "FunctionCall",
    "CellOutcome",
    "CellCall",
    "DebugAnswer",
    "DebugCall",
    "NamesOutcome",
    "NamesCall",
    "ShownValue",
]


@dataclass(frozen=True)
class ShownValue:
    """The value of a cell's last expression, as its rank would show it.

    Attributes:
        data: by MIME type; binary data in base64.
    """

    data: Mapping[str, str]

    @property
    def text(self) -> str:
        """The value as plain text."""
        return self.data.get("text/plain", "")

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, str]:
        return dict(self.data)

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class NamesOutcome:
    """A rank's report on its variables since its last answer.

    Attributes:
        assigned: names that refer to other objects now; the rank assigned them.
        names: all that there are.
        uses: names that the code of those looks up, where that may have changed.
        pulled: values that were asked for.
        last_push: number of the call that brought names of the notebook last; 0 for none.
    """

    assigned: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    uses: Mapping[str, frozenset[str]] = field(default_factory=dict)
    pulled: Mapping[str, Any] = field(default_factory=dict)
    last_push: int = 0


@dataclass(frozen=True, kw_only=True)
class CellOutcome(NamesOutcome):
    """The result of a cell on one rank; ``value`` is None where the cell shows none.

    As the result of a run it looks like the value.
    """

    value: ShownValue | None = None

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, str]:
        return {} if self.value is None else dict(self.value.data)

    def __repr__(self) -> str:
        return "None" if self.value is None else self.value.text


@dataclass(kw_only=True)
class NamesCall:
    """Assign pushed variables in a rank, and return those that are pulled.

    Attributes:
        pull: names of values that are to come back.
        pull_from: the rank whose values those are; None for all.
        fills: of the names that are pushed, those that a rank takes only where it has none.
    """

    pull: tuple[str, ...] = ()
    pull_from: int | None = None
    fills: frozenset[str] = frozenset()

    def __call__(self, /, **names: Any) -> NamesOutcome:
        """Answer for this rank."""
        namespace = _rank_namespace()
        namespace.push(names, self.fills)
        return NamesOutcome(**self.report(namespace))

    def report(self, namespace: Any, mentions: Iterable[str] = ()) -> dict[str, Any]:
        """Which names of this rank changed since the last report, and the values asked for, as the
        fields of a :class:`NamesOutcome`."""
        is_asked = self.pull_from in (None, rank.current().rank)
        report: dict[str, Any] = namespace.report(self.pull if is_asked else (), mentions)
        return report


@dataclass(kw_only=True)
class CellCall(NamesCall):
    """Run a cell.

    Attributes:
        text: of the cell, without the line of its magic.
        source: of the whole cell, as the page has it.
        first_line: number of the text's first line there.
        label: what the run is called: "In[3]".
        mentions: names that the cell may use.
        imports: modules that it reaches by their packages.
        ranks: which ranks run it; None for all.
        renews_group: whether all ranks had a process group in the call before, which did not end
            well: they make it anew first.
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
        """Run the cell if this rank is among those asked; return its outcome.

        Raises:
            BaseException: whatever the cell raises.
        """
        __tracebackhide__ = True
        namespace = _rank_namespace()
        namespace.push(names, self.fills)
        namespace.get_ready(self.mentions, renews_group=self.renews_group)
        namespace.import_modules(self.imports)
        value = None
        if self.ranks is None or rank.current().rank in self.ranks:
            value = namespace.shell.run(self.text, self.source, self.first_line)
        return CellOutcome(value=value, **self.report(namespace, self.mentions))


@dataclass(kw_only=True)
class FunctionCall(NamesCall):
    """Call a function, for ``notebook_launcher(..., session=True)``.

    Attributes:
        function, args, kwargs: what is called.
        mentions, renews_group: as those of :class:`CellCall`.
    """

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
        """Call the function in this rank, and return its result.

        Raises:
            BaseException: whatever the function raises.
        """
        __tracebackhide__ = True
        namespace = _rank_namespace()
        namespace.push(names, self.fills)
        namespace.get_ready(self.mentions, renews_group=self.renews_group, function=self.function)
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class DebugAnswer:
    """What the debugger of one rank printed, and whether it was left."""

    text: str
    is_over: bool = False


@dataclass(kw_only=True)
class DebugCall:
    """Look into the error that a call has left in a rank.

    Attributes:
        command: of pdb; None asks what the error is.
        rank: whose debugger gets the command; None for all.
    """

    command: str | None = None
    rank: int | None = None

    def __call__(self) -> DebugAnswer | None:
        """Return this rank's answer; None where it is not asked, or has no error."""
        kept, number = rank.current().kept_error, rank.current().rank
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
        """Run a pdb command; return its output, and whether it left the debugger."""
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
    """Return the traceback without the package's own frames at its end."""
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
    """Pdb that labels the code of a cell as ``Cell In[3]``."""

    stack: Any = ()

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        frame, number = frame_lineno
        filename = frame.f_code.co_filename
        line = linecache.getline(filename, number, frame.f_globals).strip()
        return f"{cells.label_of(filename)}({number}){frame.f_code.co_name}(){lprefix}{line}"
