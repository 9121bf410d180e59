"""Prepare a kernel for a launch that will probably come: start the template, mend ipykernel.

The template is the helper process from which ranks are forked; it takes seconds to start. From then
on it imports the libraries that cells import:

    a cell starts --its import statements--> follow --> the template imports while the cell does
    a cell ends   --new names in sys.modules --> follow

So ranks, which are forked from the template, have what the notebook has, without importing it
again. Statements are taken from a cell's syntax tree up to the first line that may change what an
import finds (the environment, ``sys.path``, an installation). Whatever follows that line, stands
under ``if`` or ``try``, or is imported by a function that a cell calls, is known at the cell's end.

ipykernel 7.0 to 7.3 may leave requests unread, which makes a kernel dead to its pages for good. Its
thread for the shell channel reads that socket by a stream of events, but sends replies past the
stream. A request that arrives while a reply is sent makes no event then, nor does any later one:
zmq's sockets signal new messages only once all earlier ones were read. A click right before the
next cell is enough. For these versions, the stream is made to look at its socket at intervals;
ipykernel 7.4 sends by the stream and needs no help.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from types import FunctionType, ModuleType
from typing import Any

from IPython.core.getipython import get_ipython

from notebook_accel.launch.template.handle import follow, warm
from notebook_accel.launch.text.used_names import parsed
from notebook_accel.system import processes
from notebook_accel.system.modules import OF_TEMPLATE, is_library, modules_of, own_modules
from notebook_accel.wire import ImportItem

# What a request that was left unread waits at most. To look takes some 10 us.
_LOOK_SECONDS = 0.1


@functools.cache
def keep_reading(kernel: Any) -> None:
    """Make ipykernel 7.0 to 7.3 poll its shell socket; other versions, and None, are left alone."""
    thread: Any = getattr(kernel, "shell_channel_thread", None)
    version = importlib.metadata.version("ipykernel").split(".")[:2]
    if thread is None or tuple(map(int, version)) >= (7, 4):
        return

    def look() -> None:
        # Closed where the kernel shuts down.
        if not kernel.shell_stream.closed():
            kernel.shell_stream.flush()
            thread.io_loop.call_later(_LOOK_SECONDS, look)

    thread.io_loop.add_callback(look)


def prepare(shell: Any) -> None:
    """Start the template in the background; the launch itself will report its errors."""
    keep_reading(getattr(shell, "kernel", None))
    warm()
    follow_imports(shell)


def warm_kernel() -> None:
    """Prepare if this process is the kernel of a notebook.

    Not in a script, whose first launch comes at once or never, nor in a rank.
    """
    shell = get_ipython()
    if getattr(shell, "kernel", None) is not None and processes.supported():
        prepare(shell)


# ---- what cells import --------------------------------------------------------------------

# Names in a statement after which imports may find something else.
_CHANGES_IMPORTS = {
    *("environ", "putenv", "unsetenv", "chdir", "path", "meta_path", "path_hooks", "modules"),
    *("system", "getoutput", "run", "call", "check_call", "check_output", "Popen"),
    *("run_cell_magic", "import_module", "reload", "load_dotenv", "exec"),
}
# Line magics after which they do not.
_HARMLESS_MAGICS = ("matplotlib", "load_ext", "reload_ext", "autoreload", "config", "precision")


@functools.cache
def follow_imports(shell: Any) -> None:
    """Have the template follow what this notebook imports, and has imported."""
    follower = _Follower(shell)
    shell.events.register("pre_run_cell", follower.before_cell)
    shell.events.register("post_run_cell", follower.look_at_cells)
    # The cells until now; the one that runs is looked at once more at its end.
    follower.look_at_cells()
    follower.look_at_start(shell.user_ns["In"][-1])


class _Follower:
    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._num_cells = 0
        # Libraries that cells have imported.
        self._roots: set[str] = set()
        # Modules that were looked at.
        self._seen: set[str] = set()

    def before_cell(self, info: Any) -> None:
        with suppress(Exception):  # whatever a cell has, it runs as if nobody had looked
            code = getattr(info, "transformed_cell", None)
            self.look_at_start(self._shell.transform_cell(info.raw_cell) if code is None else code)

    def look_at_start(self, code: str) -> None:
        follow(item for item in imports_at_start(code) if is_library(item.root))

    def look_at_cells(self, _result: Any = None) -> None:
        with suppress(Exception):  # whatever a cell has, it runs as if nobody had looked
            # Source with magics as calls; the first entry is no cell.
            cells = self._shell.user_ns["In"]
            found = {root for code in cells[self._num_cells :] for root in _roots(code)}
            # The last one may still run.
            self._num_cells = max(0, len(cells) - 1)
            new = sys.modules.keys() - self._seen
            self._seen |= new
            for module in own_modules(new).values():
                values = vars(module).values()
                used = [v for v in values if isinstance(v, (ModuleType, FunctionType, type))]
                names = (getattr(each, "__module__", None) or each.__name__ for each in used)
                found |= {name.partition(".")[0] for name in names}
            unknown = (found - self._roots - OF_TEMPLATE) & sys.modules.keys()
            added = {*filter(is_library, unknown)}
            self._roots |= added
            # Of a library that a cell imports for the first time, older modules too: what is the
            # notebook's now may have been imported by another library before.
            wanted = [n for n in sys.modules if n in new or n.partition(".")[0] in added]
            follow(map(ImportItem, modules_of(self._roots, wanted)))


def imports_at_start(code: str) -> list[ImportItem]:
    """Return what a cell imports at its top level, as long as nothing before changes imports."""
    return [*_imports(takewhile(lambda one: not _may_change_imports(one), parsed(code).body))]


def _imports(nodes: Iterable[ast.AST]) -> Iterator[ImportItem]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (ImportItem(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = (alias.name for alias in node.names if alias.name != "*")
            yield ImportItem(node.module, tuple(names))


def _roots(code: str) -> Iterator[str]:
    """Yield what a cell may have imported, anywhere in it; also below %%time, which has a text."""
    for node in ast.walk(parsed(code)):
        yield from (item.root for item in _imports([node]))
        if isinstance(node, ast.Constant) and "import " in str(node.value):
            yield from _roots(str(node.value))


def _may_change_imports(statement: ast.AST) -> bool:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "run_line_magic":
            if not node.args or getattr(node.args[0], "value", "") not in _HARMLESS_MAGICS:
                return True
        elif getattr(node, "attr", getattr(node, "id", "")) in _CHANGES_IMPORTS:
            return True
    return False
