"""A cell as one function: what ``%%accelerate --fresh`` runs on every rank.

The cell's source is rewritten as a syntax tree. Of the cell

    import math
    total: int = rank + 1
    math.sqrt(total)

comes the function

    def cell():
        global math, total
        from notebook_accel.training.functions.cell_globals import rank
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
import types
from typing import Any

from notebook_accel.notebook.used_names import names_of

__all__ = ["PROVIDED", "cell_function", "shown"]

# What a cell of the magic finds in its ranks. In a session, a name of the notebook's that is called
# so counts from its next assignment on.
PROVIDED = ("accelerator", "device", "rank", "world_size")
_PROVIDER = "notebook_accel.training.functions.cell_globals"
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
    names = names_of(text)
    provided = [name for name in PROVIDED if name in names.used]
    # Imports of ``__future__`` must stay at the top of the module.
    futures = [node for node in tree.body if _is_future(node)]
    plain = _WithoutAnnotations().visit(
        ast.Module([node for node in tree.body if not _is_future(node)], type_ignores=[])
    )
    function = ast.parse("def cell(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [
        *([ast.Global(sorted(names.assigned))] if names.assigned else []),
        *([ast.ImportFrom(_PROVIDER, [ast.alias(n) for n in provided], 0)] if provided else []),
        ast.ImportFrom(__name__, [ast.alias("shown", _SHOW)], 0),
        *_with_result(plain.body, text),
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


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _with_result(body: list[ast.stmt], text: str) -> list[ast.stmt]:
    """The statements, where a last expression without a semicolon returns its value as text."""
    if not body or not isinstance(body[-1], ast.Expr):
        return body
    last = body[-1]
    after = text.splitlines()[(last.end_lineno or 0) - 1].encode()[last.end_col_offset :]
    if after.lstrip().startswith(b";"):
        return body
    call = ast.Call(ast.Name(_SHOW, ast.Load()), [last.value], [])
    return [*body[:-1], ast.copy_location(ast.Return(ast.copy_location(call, last)), last)]


class _WithoutAnnotations(ast.NodeTransformer):
    """Turns ``x: int = 3`` into ``x = 3``: Python takes no annotation on a name that is global.

    Functions and classes inside of the cell keep theirs.
    """

    def visit(self, node: ast.AST) -> Any:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return node if isinstance(node, kinds) else super().visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)
