"""A cell as one function: what ``%%accelerate --fresh`` runs on every rank.

The cell's source is rewritten as a syntax tree. Of the cell

    import math
    total: int = rank + 1
    math.sqrt(total)

comes the function

    def cell():
        global math, total
        from notebook_accel.training.functions.cell_names import rank
        from notebook_accel.notebook.cell_function import shown as _notebook_accel_shown
        import math
        total = rank + 1
        return _notebook_accel_shown(math.sqrt(total))

so that the names that the cell assigns are globals, as they would be in a notebook, and the value
of a last expression is what it returns, as text.
"""

from __future__ import annotations

import ast
import re
import symtable
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PROVIDED", "cell_function", "shown"]

# What a cell of the magic finds in its ranks. In a session, a name of the notebook's that is called
# so counts from its next assignment on.
PROVIDED = ("accelerator", "device", "rank", "world_size")
_PROVIDER = "notebook_accel.training.functions.cell_names"
# Characters of a value's text: about four pages.
_MAX_SHOWN = 20_000
_SHOW = "_notebook_accel_shown"
# ``!ls``, ``%time f()``, ``files = !ls``, ``?name`` and ``name?``.
_IPYTHON_LINE = re.compile(r"\s*([!%?]|[\w\s,.]+=\s*[!%]|[\w.]+\?\??\s*$)")
_IPYTHON_LINE_REFUSED = (
    "shell lines (!), magics (%) and help (?) are not supported in a cell that runs on the ranks; "
    "put this line into a cell of its own, or call subprocess.run for a shell command"
)


def cell_function(
    text: str, *, namespace: dict[str, Any], filename: str, name: str, first_line: int = 1
) -> types.FunctionType:
    """Make the function that runs ``text``.

    Args:
        text: source of the cell.
        namespace: the notebook's names: globals of the function.
        filename: what tracebacks call its file.
        name: what the run is called.
        first_line: number of the text's first line in that file.

    Raises:
        SyntaxError: ``text`` is no Python, or holds what no function can (``import *``).
    """
    # All line numbers, those of syntax errors too, count from the start of the file.
    source = "\n" * (first_line - 1) + text
    try:
        code = _compile(source, filename)
    except SyntaxError as error:
        line = max((error.lineno or 0) - 1, 0)
        if any(_IPYTHON_LINE.match(part) for part in source.splitlines()[line : line + 1]):
            error.msg = _IPYTHON_LINE_REFUSED
        raise
    function = types.FunctionType(code, namespace, name)
    function.__qualname__, function.__module__ = name, "__main__"
    return function


def _compile(text: str, filename: str) -> types.CodeType:
    """Compile a function with the statements of ``text``; gives its code."""
    tree = ast.parse(text, filename)
    # What is wrong at the top of a cell may be right in a function, as a ``return`` is.
    compile(tree, filename, "exec", dont_inherit=True)
    assigned, mentioned = _names(text, filename)
    provided = [name for name in PROVIDED if name in mentioned - assigned]
    # Imports of ``__future__`` must stay at the top of the module.
    futures = [node for node in tree.body if _is_future(node)]
    plain = _WithoutAnnotations().visit(
        ast.Module([node for node in tree.body if not _is_future(node)], type_ignores=[])
    )
    function = ast.parse("def cell(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [
        *([ast.Global(sorted(assigned))] if assigned else []),
        *([ast.ImportFrom(_PROVIDER, [ast.alias(n) for n in provided], 0)] if provided else []),
        ast.ImportFrom(__name__, [ast.alias("shown", _SHOW)], 0),
        *(plain.body if _ends_with_semicolon(text) else _with_result(plain.body)),
    ]
    module = ast.Module([*futures, function], type_ignores=[])
    ast.fix_missing_locations(module)
    code = compile(module, filename, "exec", dont_inherit=True)
    return next(part for part in code.co_consts if isinstance(part, types.CodeType))


def shown(value: Any) -> str | None:
    """What a rank shows of the value of a cell's last expression; None for nothing."""
    if value is None:
        return None
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _names(text: str, filename: str) -> tuple[set[str], set[str]]:
    """The names that the cell assigns at its top, and all that it mentions anywhere."""
    top = symtable.symtable(text, filename, "exec")
    tables = list(_walk(top))
    assigned = {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if (symbol.is_assigned() or symbol.is_imported())
        and (table is top or symbol.is_declared_global())
    }
    return assigned, {name for table in tables for name in table.get_identifiers()}


def _walk(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _walk(child)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _with_result(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements, where the last one is an expression with its value returned as text."""
    if not body or not isinstance(body[-1], ast.Expr):
        return body
    last = body[-1]
    call = ast.Call(ast.Name(_SHOW, ast.Load()), [last.value], [])
    return [*body[:-1], ast.copy_location(ast.Return(ast.copy_location(call, last)), last)]


def _ends_with_semicolon(text: str) -> bool:
    """Whether the cell shows nothing by IPython's own rule."""
    from IPython.core.displayhook import DisplayHook

    rule = getattr(DisplayHook, "semicolon_at_end_of_expression", None)
    if rule is not None:
        return bool(rule(text))
    # IPython 7 has the rule inside of a method that reads the newest cell of the shell's history.
    history = types.SimpleNamespace(input_hist_parsed=[text])
    shell = types.SimpleNamespace(history_manager=history)
    return bool(DisplayHook.quiet(types.SimpleNamespace(shell=shell)))  # type: ignore[arg-type, no-untyped-call]


class _WithoutAnnotations(ast.NodeTransformer):
    """Turns ``x: int = 3`` into ``x = 3``: Python takes no annotation on a name that is global.

    Functions and classes inside of the cell keep theirs.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)
