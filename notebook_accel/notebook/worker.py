"""A rank's side of a session: the requests of the notebook, and the shell that runs cells.

    notebook: CellCall(...) --Session.call--> rank: request(**names) --> RankAnswer

The notebook makes an instance of a request class, and each rank calls that instance. The arguments
of the call are the variables that the notebook pushes along. A rank answers with the changes of its
own variables. These live in the module ``__main__`` of the rank. A :class:`Namespace` knows which
of them were assigned in the rank, rather than pushed, since its last report to the notebook.

``%accelerate debug`` sends a :class:`DebugCall` for each command of pdb that the user types. It
looks into the frames that an error has left in a rank, and cannot resume them: the failed call is
over, and the ranks wait for the next one.
"""

# IPython carries few types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import io
import pdb
import sys
import traceback
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, ClassVar

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.launch.payload import cells
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.text.used_names import is_history
from notebook_accel.launch.worker import displays
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

    Attributes:
        pull_from: one rank, None for all.
        fills: names of which a rank takes the pushed value only if it lacks them.
        uses_accelerator: whether the code, or what it calls, may use that name.
        renews_group: after a failed call in which ranks left their process group.
    """

    pull: tuple[str, ...] = ()
    pull_from: int | None = None
    fills: frozenset[str] = frozenset()
    uses_accelerator: bool = False
    renews_group: bool = False

    def __call__(self, /, **names: Any) -> RankAnswer:
        return self.outcome(self.begin(names))

    def begin(self, names: Mapping[str, Any]) -> Namespace:
        namespace = rank_namespace()
        namespace.push(names, self.fills)
        namespace.get_ready(self.uses_accelerator, renews_group=self.renews_group)
        return namespace

    def outcome(self, namespace: Namespace, value: Any = None) -> RankAnswer:
        is_asked = self.pull_from in (None, this_rank.current().rank)
        return namespace.report(self.pull if is_asked else (), value)


@dataclass(kw_only=True)
class CellCall(NamesCall):
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
class FunctionCall(NamesCall):
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
        text = cells.name_files(debugger.stdout.getvalue())
        debugger.stdout.seek(0)
        debugger.stdout.truncate()
        return DebugAnswer(text, is_over=leaves)


# ---- the variables of a rank ---------------------------------------------------------------

# What every cell finds from the start; an accelerator is made for the first cell that uses one.
_TRAINING = "notebook_accel.training.cell_globals"
_AT_ONCE = ("rank", "world_size", "device")
_ACCELERATOR = "accelerator"

_namespace: Namespace | None = None


def rank_namespace() -> Namespace:
    """Return this rank's ``Namespace``; the first call makes it, with its shell."""
    global _namespace
    if _namespace is None:
        main = sys.modules["__main__"]
        shell = RankShell.instance(user_module=main, user_ns=vars(main), colors="NoColor")
        _namespace = Namespace(shell)
    return _namespace


class Namespace:
    """The variables of this rank, with a record of what the notebook has been told of them."""

    def __init__(self, shell: RankShell) -> None:
        self.shell = shell
        self._last_push = 0
        self._names: dict[str, Any] = shell.user_ns
        training = import_module(_TRAINING)
        self._names.update({name: getattr(training, name) for name in _AT_ONCE})
        self._first_names = dict(self._names)
        self._reported = self._objects()

    def push(self, names: Mapping[str, Any], fills: Collection[str] = ()) -> None:
        """Assign what the notebook sent; names of ``fills`` only if this rank lacks them."""
        if "__name__" not in self._names:  # a cell ran `globals().clear()`
            self._names.update({**self._first_names, **self._names})
        if names:
            self._last_push = this_rank.current().call
        names = {
            name: value
            for name, value in names.items()
            if name not in fills or name not in self._names
        }
        self._names.update(names)
        self._reported.update({name: id(value) for name, value in names.items()})

    def get_ready(self, uses_accelerator: bool, *, renews_group: bool) -> None:
        """Renew the process group and provide ``accelerator``, if needed; all ranks call this."""
        if renews_group:
            for line in import_module("notebook_accel.training.processes.topology").renew_group():
                this_rank.current().notice(line)
        if uses_accelerator and _ACCELERATOR not in self._names:
            self._names[_ACCELERATOR] = getattr(import_module(_TRAINING), _ACCELERATOR)
            self._reported[_ACCELERATOR] = id(self._names[_ACCELERATOR])

    def report(self, pull: Iterable[str], value: Any) -> RankAnswer:
        """Return the changes since the last report, beside the value of a cell."""
        now = self._objects()
        assigned = frozenset(name for name, key in now.items() if self._reported.get(name) != key)
        self._reported = now
        return RankAnswer(
            assigned=assigned,
            names=frozenset(now),
            pulled={name: self._names[name] for name in pull if name in self._names},
            last_push=self._last_push,
            value=value,
        )

    def _objects(self) -> dict[str, int]:
        hidden = self.shell.user_ns_hidden
        return {
            name: id(value)
            for name, value in self._names.items()
            if not (name in hidden and hidden[name] is value)
            and not name.startswith("__")
            and not is_history(name)
        }


# ---- the shell of a rank: it runs cells as a kernel does, and keeps what they show ------------


# As of what a rank displays: a page with more of it stands still.
_MAX_BYTES = 2_000_000


class _Compiler(CachingCompiler):
    """IPython's compiler cache, with the file name that a cell has in the notebook."""

    filename = "<cell>"

    def cache(self, *_args: Any, **_options: Any) -> str:
        return self.filename


class _Hook(DisplayHook):
    """Keeps the newest value by MIME type (None: there was none), and prints nothing."""

    shown: dict[str, Any] | None = None

    def write_output_prompt(self) -> None:
        return

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        self.shown = format_dict

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankShell(InteractiveShell):
    """Runs cells in one rank; no history, and values and errors are the notebook's to show."""

    displayhook_class: Any = _Hook

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.compile: Any = _Compiler()
        self._hook: Any = self.displayhook
        # It names ways out that end no rank.
        warnings.filterwarnings("ignore", message="To exit: use 'exit'")
        displays.format_by(self.display_formatter)

    def init_history(self) -> None:
        # The history on disk is the person's own, and the notebook writes it.
        self.history_manager: Any = HistoryManager(shell=self, parent=self, enabled=False)
        configurables: Any = self.configurables
        configurables.append(self.history_manager)

    def run(self, text: str, source: CellSource, first_line: int) -> dict[str, str] | None:
        """Return the last expression's value by MIME type, or None; raise what the cell raises.

        ``text`` begins at line ``first_line`` of ``source``, which tracebacks quote.
        """
        cells.install_sources([source])
        self.compile.filename = source.filename
        self._hook.shown = None
        # The lines of the cell's own magic are there as comments, so that lines are numbered as on
        # the page. A magic for the whole cell must come first, whatever the numbers are then.
        head = "" if text.startswith("%%") else "#\n" * (first_line - 1)
        result = self.run_cell(head + text, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        __tracebackhide__ = True
        if error is not None:
            raise error
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None and pyplot.get_fignums():
            pyplot.show()
        if self._hook.shown is None:
            return None
        texts = {"text/plain": "", **displays.sendable(self._hook.shown)}
        size = sum(map(len, texts.values()))
        if size > _MAX_BYTES:
            short = texts["text/plain"][:20_000]
            note = f"… (not shown: {size / 1e6:.1f} MB, the limit is {_MAX_BYTES / 1e6:.0f} MB)"
            texts = {"text/plain": f"{short}{note}"}
        return texts

    # An error is raised to the notebook, which shows it: nobody reads one that is printed here.

    def showtraceback(self, *_args: Any, **_options: Any) -> None:
        return

    def showsyntaxerror(self, *_args: Any, **_options: Any) -> None:
        return

    def ask_exit(self) -> None:
        """IPython calls this for ``exit`` in a cell."""
        raise SystemExit

    def enable_gui(self, gui: Any = None) -> None:
        return


# ---- the debugger of a rank ------------------------------------------------------------------

_GOES_ON = (
    "nothing goes on here, the call is over: w, u, d, l, ll, a, p, pp look around, q leaves\n"
)


def _debugger_of(error: BaseException) -> pdb.Pdb:
    """Return pdb in the frames of an error, down to the person's own; its ``stdout`` keeps text."""
    from notebook_accel.launch.worker import main  # in a rank alone

    frames = [*traceback.walk_tb(users_frames(error, caller=main.__file__))]
    while len(frames) > 1 and _is_ours(frames[-1][0]):
        frames.pop()
    entry: TracebackType | None = None
    for frame, line in reversed(frames):
        entry = TracebackType(entry, frame, frame.f_lasti, line)
    made = pdb.Pdb(stdout=io.StringIO(), nosigint=True, readrc=False)
    made.reset()
    made.setup(None, entry)
    return made


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return "__tracebackhide__" in frame.f_locals or module.startswith("notebook_accel.")
