"""Finds the libraries that a notebook's cells import, and has the template import them as well.

    a cell starts --its import statements--> follow --> the template imports while the cell does
    a cell ends   --new names in sys.modules --> follow

So ranks, which are forked from the template, have what the notebook has, without importing it
again. Statements are taken from a cell's syntax tree up to the first line that may change what an
import finds (the environment, ``sys.path``, an installation). Whatever follows that line, stands
under ``if`` or ``try``, or is imported by a function that a cell calls, is known at the cell's end.
"""

from __future__ import annotations

import ast
import functools
import logging
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.template.handle import follow
from notebook_accel.launch.template.libraries import (
    OF_TEMPLATE,
    file_of,
    is_library,
    is_library_file,
)
from notebook_accel.launch.wire import ImportItem

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

# Names in a statement after which imports may find something else.
_CHANGES_IMPORTS = {
    *("environ", "putenv", "unsetenv", "chdir", "path", "meta_path", "path_hooks", "modules"),
    *("system", "getoutput", "run", "call", "check_call", "check_output", "Popen"),
    *("run_cell_magic", "import_module", "reload", "load_dotenv", "exec"),
}
_MAGICS = ("run_line_magic", "run_cell_magic")
# Line magics after which they do not.
_HARMLESS_MAGICS = ("matplotlib", "load_ext", "reload_ext", "autoreload", "config", "precision")


@functools.cache
def follow_imports(shell: Any) -> None:
    """Have the template follow what this notebook imports, and has imported."""
    follower = _Follower(shell)
    shell.events.register("pre_run_cell", follower.before_cell)
    shell.events.register("post_run_cell", follower.after_cell)
    # The cells until now; the one that runs is looked at once more at its end.
    follower.look_at_cells()
    follow(i for i in imports_at_start(shell.user_ns["In"][-1]) if is_library(i.root))


class _Follower:
    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._num_cells = 0
        # Libraries that cells have imported.
        self._roots: set[str] = set()
        # Modules that were looked at.
        self._seen: set[str] = set()

    def before_cell(self, info: Any) -> None:
        code = getattr(info, "transformed_cell", None)
        try:
            code = self._shell.transform_cell(info.raw_cell) if code is None else code
            follow(item for item in imports_at_start(code) if is_library(item.root))
        except Exception:  # whatever a cell has: it runs as if nobody had looked
            _log.debug("the imports of a cell were not found", exc_info=True)

    def after_cell(self, _result: Any = None) -> None:
        try:
            self.look_at_cells()
        except Exception:  # as above
            _log.debug("the imports of a cell were not found", exc_info=True)

    def look_at_cells(self) -> None:
        # Source with magics as calls; the first entry is no cell.
        cells = self._shell.user_ns["In"]
        found = {i.root for code in cells[self._num_cells :] for i in _imports(code, is_deep=True)}
        # The last one may still run.
        self._num_cells = max(0, len(cells) - 1)
        new = sys.modules.keys() - self._seen
        self._seen |= new
        own = {root for root in {name.partition(".")[0] for name in new} if _is_own(root)}
        found |= {r for name in new if name.partition(".")[0] in own for r in _used_by(name)}
        added = (found - self._roots - OF_TEMPLATE) & sys.modules.keys()
        added = {root for root in added if is_library(root)}
        self._roots |= added
        if not (added or new):
            return
        # Of a library that a cell imports for the first time, older modules too: what is the
        # notebook's now may have been imported by another library before.
        names = [
            name
            for name in sys.modules
            if (root := name.partition(".")[0]) in self._roots and (root in added or name in new)
        ]
        follow(ImportItem(name) for name in names if file_of(sys.modules.get(name)))


def _is_own(root: str) -> bool:
    """Whether a module is the notebook's own, or installed in editable mode."""
    path = file_of(sys.modules.get(root))
    return bool(path) and not is_library_file(path) and root != "notebook_accel"


def _used_by(name: str) -> set[str]:
    values = vars(sys.modules[name]).values()
    used = [v for v in values if isinstance(v, (ModuleType, FunctionType, type))]
    return {(getattr(v, "__module__", None) or v.__name__).partition(".")[0] for v in used}


def imports_at_start(code: str) -> list[ImportItem]:
    """Return what a cell imports at its top level, as long as nothing before changes imports."""
    return [*_imports(code)]


def _imports(code: str, *, is_deep: bool = False) -> Iterator[ImportItem]:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return
    statement: Any
    for statement in _below(tree) if is_deep else tree.body:
        if isinstance(statement, ast.Import):
            yield from (ImportItem(alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            if statement.module and not statement.level:
                names = (alias.name for alias in statement.names if alias.name != "*")
                yield ImportItem(statement.module, tuple(names))
        elif is_deep and isinstance(statement, ast.Expr):
            call: Any = statement.value
            if getattr(getattr(call, "func", None), "attr", "") in _MAGICS:
                # Below %%time, say, which has the code as its last argument.
                for argument in call.args[-1:]:
                    text = getattr(argument, "value", "")
                    yield from _imports(text if isinstance(text, str) else "", is_deep=True)
        elif not is_deep and _may_change_imports(statement):
            return


def _below(node: Any) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, name, ()):
            yield statement
            yield from _below(statement)


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
