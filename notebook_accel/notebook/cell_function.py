"""A cell as one function: what a magic runs on every rank.

The names that the cell assigns become globals of the function, as they would be in a notebook;
the value of a last expression is what it returns, as text.
"""

from __future__ import annotations

import ast
import re
import symtable
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PROVIDED", "cell_function", "shown"]

PROVIDED = ("accelerator", "device", "rank", "world_size")
_PROVIDER = "notebook_accel.training.cell_names"
_MAX_SHOWN = 20_000
_SHOW = "_notebook_accel_shown"
# ``!ls``, ``%time f()``, ``files = !ls``, ``?name`` and ``name?``.
_OF_IPYTHON = re.compile(r"\s*([!%?]|[\w\s,.]+=\s*[!%]|[\w.]+\?\??\s*$)")
_NOT_PYTHON = (
    "shell lines (!), magics (%) and help (?) are not supported in a cell that runs on the ranks; "
    "put this line into a cell of its own, or call subprocess.run for a shell command"
)


def cell_function(
    text: str, *, namespace: dict[str, Any], filename: str, name: str, first_line: int = 1
) -> types.FunctionType:
    """The function that runs ``text``.

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
    placed = "\n" * (first_line - 1) + text
    try:
        code = _compiled(placed, filename)
    except SyntaxError as error:
        _explain(error, placed)
        raise
    made = types.FunctionType(code, namespace, name)
    made.__qualname__, made.__module__ = name, "__main__"
    return made


def _compiled(text: str, filename: str) -> types.CodeType:
    """The code of a function with the statements of ``text``."""
    tree = ast.parse(text, filename)
    # What is wrong at the top of a cell may be right in a function, as a ``return`` is.
    compile(tree, filename, "exec", dont_inherit=True)
    assigned, mentioned = _names(text, filename)
    futures, body = _split(tree.body)
    provided = [name for name in PROVIDED if name in mentioned - assigned]
    function = _define(
        [
            *([ast.Global(sorted(assigned))] if assigned else []),
            *_import(_PROVIDER, [(name, None) for name in provided]),
            *_import(__name__, [("shown", _SHOW)]),
            *_with_result(_without_annotations(body), is_silent=_is_silent(text)),
        ]
    )
    module = ast.Module([*futures, function], type_ignores=[])
    ast.fix_missing_locations(module)
    code = compile(module, filename, "exec", dont_inherit=True)
    return next(part for part in code.co_consts if isinstance(part, types.CodeType))


def _explain(error: SyntaxError, text: str) -> None:
    """Say so where the line is none of Python's but one of IPython's."""
    line = (error.lineno or 0) - 1
    if any(_OF_IPYTHON.match(part) for part in text.splitlines()[max(line, 0) : line + 1]):
        error.msg = _NOT_PYTHON


def shown(value: Any) -> str | None:
    """What a rank shows of the value of a cell's last expression."""
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
        if _is_bound(symbol) and (table is top or symbol.is_declared_global())
    }
    return assigned, {name for table in tables for name in table.get_identifiers()}


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported()


def _walk(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _walk(child)


def _split(body: Sequence[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Imports of ``__future__``, which stay at the top of the module, and the rest."""
    futures = [node for node in body if _is_future(node)]
    return futures, [node for node in body if not _is_future(node)]


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _define(body: list[ast.stmt]) -> ast.FunctionDef:
    function = ast.parse("def cell(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    return function


def _import(module: str, names: list[tuple[str, str | None]]) -> list[ast.stmt]:
    aliases = [ast.alias(name, new_name) for name, new_name in names]
    return [ast.ImportFrom(module, aliases, level=0)] if aliases else []


def _with_result(body: list[ast.stmt], *, is_silent: bool) -> list[ast.stmt]:
    """The statements, the last expression returned."""
    if not body or is_silent or not isinstance(body[-1], ast.Expr):
        return body
    last = body[-1]
    call = ast.Call(ast.Name(_SHOW, ast.Load()), [last.value], [])
    return [*body[:-1], ast.copy_location(ast.Return(ast.copy_location(call, last)), last)]


def _is_silent(text: str) -> bool:
    """A last line that ends with a semicolon shows nothing, as in IPython."""
    lines = [line.split("#")[0].rstrip() for line in text.splitlines()]
    return any(lines) and next(line for line in reversed(lines) if line).endswith(";")


def _without_annotations(body: list[ast.stmt]) -> list[ast.stmt]:
    """Python takes no annotation on a global: ``x: int = 3`` becomes ``x = 3``."""
    module = _Plain().visit(ast.Module(body, type_ignores=[]))
    assert isinstance(module, ast.Module)
    return module.body


class _Plain(ast.NodeTransformer):
    """Takes annotations from assignments, outside of functions and classes."""

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
