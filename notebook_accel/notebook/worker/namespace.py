"""The variables of one rank of a session, and the IPython shell that runs cells on them.

They live in the module ``__main__`` of the rank. A :class:`Namespace` knows which of them were
assigned in the rank, rather than pushed by the notebook, since its last report to the notebook.
"""

# IPython carries few types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.launch.payload import cells
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.text.used_names import is_history
from notebook_accel.launch.worker import displays
from notebook_accel.rank import this_rank

# ---- The IPython shell of a rank: it runs cells as a kernel does, and keeps what they show.


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

    def report(self, pull: Iterable[str] = ()) -> dict[str, Any]:
        """Return the changes since the last report, as the fields of a ``RankAnswer``."""
        now = self._objects()
        assigned = frozenset(name for name, key in now.items() if self._reported.get(name) != key)
        self._reported = now
        return {
            "assigned": assigned,
            "names": frozenset(now),
            "pulled": {name: self._names[name] for name in pull if name in self._names},
            "last_push": self._last_push,
        }

    def _objects(self) -> dict[str, int]:
        hidden = self.shell.user_ns_hidden
        return {
            name: id(value)
            for name, value in self._names.items()
            if not (name in hidden and hidden[name] is value)
            and not name.startswith("__")
            and not is_history(name)
        }
