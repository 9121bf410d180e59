"""Reads in the notebook's cells what they did to libraries, for the ranks to repeat.

    cells' text --> assignments, calls --+
    rows of launch/setup/states.py ---+--> steps, notices --> LaunchRequest
    ``%%everywhere`` cells --------------+

Of the notebook's own modules, whose files are beside it, objects with data count as well: what a
cell assigned below one, and all that one holds, once a cell has called a method of it.

Only statements at the top level of a cell count, also under ``if``, ``for`` and ``try``. A cell's
text says which place of which library it changed; the value is the one that stands there at the
launch. A call of which nobody knows whether it can be repeated is named to the user, once.
"""

from __future__ import annotations

import argparse
import ast
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from notebook_accel.launch import setup
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.setup import Path, Step, states
from notebook_accel.launch.text.terminal_text import one_line
from notebook_accel.launch.text.used_names import parsed
from notebook_accel.system.modules import own_modules

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# Python's own state, which ranks get otherwise or have of their own.
_NOT_SET = ("os.environ", "sys.", "os.path", "builtins.display", "logging.root")
# Cell magics whose cell is Python that runs in the notebook.
_RUNS_ITS_CELL = ("time", "timeit", "capture", "prun")
# Nodes of an expression that can be evaluated once more without an effect.
_PLAIN = (
    *(ast.Attribute, ast.Constant, ast.Dict, ast.List, ast.Name, ast.Set, ast.Subscript),
    *(ast.Tuple, ast.UnaryOp, ast.expr_context, ast.unaryop),
)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_DATA = (argparse.Namespace, dict, list, set, types.SimpleNamespace)
_MAX_LABEL = 80
# Lines that the user was told in this kernel.
_told: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class _Found:
    """An assignment to ``path`` below a name, or a call; ``from X import *`` has the name ""."""

    label: str
    root: str
    path: Path
    called: ast.Call | None = None


def read_setup(shell: InteractiveShell | None) -> tuple[list[Step], tuple[str, ...]]:
    """Return what this process, and the cells that ``shell`` has run, did to libraries.

    And lines for the user about what of it ranks cannot repeat.
    """
    packed: dict[str, Step] = {}
    lost: list[str] = []
    everywhere = (
        (key, source.label, "", setup.run_cell, code, source)
        for key, (code, source) in EVERYWHERE.items()
    )
    done = (*states.states(), *_repeated(shell, lost), *everywhere)
    for key, label, module, do, *arguments in done:
        try:
            packed[key] = setup.pack_step(key, label, module, do, *arguments)
        except (Exception, SystemExit) as error:  # whatever a user's object does to be pickled
            lost.append(f"`{label}` ({one_line(str(error) or type(error).__name__, 80)})")
    new = [text for text in lost if text not in _told]
    _told.update(new)
    notice = (
        f"only in the notebook, not in the ranks: {', '.join(new)}. Put it into the function, or "
        "into a cell that begins with %%everywhere"
    )
    return [*packed.values()], (notice,) if new else ()


# ---- statements of cells -------------------------------------------------------------------


def _repeated(shell: InteractiveShell | None, lost: list[str]) -> Iterator[tuple[Any, ...]]:
    namespace = shell.user_ns if shell else {}
    own = own_modules([*sys.modules])
    for text in namespace.get("In", ()):
        for found in _statements(text):
            if not found.root:
                # Its effect may be all that is wanted of it.
                importing = "importlib", setup.call, ("import_module",)
                yield (found.label, found.label, *importing, found.path, {})
                continue
            place = _place(found, namespace, own)
            if place is None:
                continue  # it is no library's, was taken back, or the cell ended before it
            name, path, value = place
            dotted = ".".join([name, *(str(part) for part in path)])
            if found.called is None:
                if not dotted.startswith(_NOT_SET):
                    yield dotted, found.label, name, setup.assign, path, value
                continue
            owner = setup.value_at(sys.modules[name], path[:-1])
            if name in own and (isinstance(owner, _DATA) or type(owner).__module__ in own):
                yield dotted.rpartition(".")[0], found.label, name, setup.refill, path[:-1], owner
                continue
            qualified = getattr(value, "__qualname__", "") or type(value).__qualname__
            names = (dotted, f"{getattr(value, '__module__', '')}.{qualified}")
            arguments = _arguments(found.called, namespace)
            if arguments is not None and states.is_repeated(*names):
                yield f"{dotted} {found.label}", found.label, name, setup.call, path, *arguments
            elif states.is_repeated(*names) or states.is_unknown_setter(*names):
                lost.append(f"`{found.label}`")


def _place(
    found: _Found, namespace: dict[str, Any], own: dict[str, types.ModuleType]
) -> tuple[str, Path, Any] | None:
    """Return the module that a statement changed, the path below it and the value there.

    None for what the cells define, and for what is not there any more.
    """
    root = namespace.get(found.root)
    name = below = ""
    if isinstance(root, types.ModuleType):
        name = root.__name__
    elif isinstance(root, _NAMED):
        name, below = root.__module__ or "", root.__qualname__
    elif isinstance(root, _DATA) or type(root).__module__ in own:
        # `from config import cfg`: the module has the same object.
        held = ((n, key) for n, m in own.items() for key, one in vars(m).items() if one is root)
        name, below = next(held, ("", ""))
    if name == "__main__" or name not in sys.modules:
        return None
    path = (*(below.split(".") if below else ()), *found.path)
    try:
        return name, path, setup.value_at(sys.modules[name], path)
    except (AttributeError, LookupError, TypeError):
        return None


def _arguments(node: ast.Call, namespace: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return None where evaluating them again could have an effect."""
    parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    if not all(isinstance(inner, _PLAIN) for part in parts for inner in ast.walk(part)):
        return None
    packing = ast.Call(ast.Name("_pack", ast.Load()), node.args, node.keywords)
    code = ast.fix_missing_locations(ast.Expression(packing))
    pack = {"_pack": lambda *args, **kwargs: (args, kwargs)}
    with suppress(Exception):  # a name that was deleted, say
        return eval(compile(code, "<cell>", "eval"), namespace, pack)  # type: ignore[no-any-return]
    return None


@lru_cache(maxsize=4096)
def _statements(text: str) -> tuple[_Found, ...]:
    return tuple(_in_block(parsed(text).body))


def _in_block(block: Iterable[ast.stmt]) -> Iterator[_Found]:
    for node in block:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from _found(target, node)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and not node.level:
            yield _Found(label=ast.unparse(node), root="", path=(node.module or "",))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _in_call(node.value)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from _in_decorators(node)
        elif isinstance(node, (ast.If, ast.For, ast.Try)):
            for part in ("body", "orelse", "finalbody"):
                yield from _in_block(getattr(node, part, ()))


def _in_decorators(node: ast.FunctionDef | ast.ClassDef) -> Iterator[_Found]:
    for decorator in node.decorator_list:
        made = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = f"@{ast.unparse(decorator)}"
        # Its argument is what is decorated, which only the cell can give it.
        whole = ast.Call(made, [ast.Call(ast.Name("..."), [], [])], [])
        yield from _found(made, ast.Name(name), called=whole)
        if isinstance(node, ast.FunctionDef) and "patch" in name:
            # fastcore's assign the function to the class of `self: Learner`, or to their argument.
            given = decorator.args if isinstance(decorator, ast.Call) else []
            annotated = [one.annotation for one in node.args.args[:1] if one.annotation]
            # With options they make properties, say, which this does not carry.
            owners = () if getattr(decorator, "keywords", ()) else given or annotated
            for part in (part for owner in owners for part in ast.walk(owner)):
                if isinstance(part, (ast.Name, ast.Attribute)):  # of several: (A, B) or A | B
                    for own in (node.name, f"_orig_{node.name}"):
                        yield from _found(ast.Attribute(part, own), ast.Name(f"{name} {own}"))


def _in_call(node: ast.Call) -> Iterator[_Found]:
    match node:
        case ast.Call(func=ast.Name("setattr"), args=[owner, ast.Constant(str(name)), _]):
            yield from _found(ast.Attribute(owner, name), node)
        case ast.Call(
            func=ast.Attribute(ast.Call(func=ast.Name("get_ipython")), "run_cell_magic"),
            args=[ast.Constant(magic), _, ast.Constant(cell)],
        ) if magic in _RUNS_ITS_CELL:
            yield from _statements(cell)
        case ast.Call(func=ast.Attribute(owner, "update"), args=[ast.Dict(keys=keys)]):
            for key in keys:
                if isinstance(key, ast.Constant):
                    yield from _found(ast.Subscript(owner, key), node)
        case _:
            yield from _found(node.func, node, called=node)


def _found(
    target: ast.expr, statement: ast.AST, called: ast.Call | None = None
) -> Iterator[_Found]:
    path: list[Any] = []
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        if isinstance(target, ast.Attribute):
            path.insert(0, target.attr)
        elif isinstance(target.slice, ast.Constant):
            path.insert(0, (target.slice.value,))
        else:
            return
        target = target.value
    # An assignment to a name alone is the notebook's own.
    if isinstance(target, ast.Name) and (path or called is not None):
        label = one_line(ast.unparse(statement), _MAX_LABEL)
        yield _Found(label=label, root=target.id, path=tuple(path), called=called)


# ---- cells that run everywhere -------------------------------------------------------------

# By cell: its code for the ranks, and its source for tracebacks; in the order of their first runs.
EVERYWHERE: dict[str, tuple[str, CellSource]] = {}


def run_everywhere(shell: Any, line: str, cell: str, label: str) -> None:
    """Run a cell here and at the start of all ranks; run again, it replaces its earlier text."""
    text = f"%%everywhere {line}\n{cell}"
    source = CellSource(shell.compile.cache(text), label, text)
    code = "\n" + shell.transform_cell(cell)
    statements = ast.parse(code, source.filename).body
    # An expression at the end shows its value, as in any cell.
    shown: list[ast.stmt] = [node for node in statements[-1:] if isinstance(node, ast.Expr)]
    quiet = ast.Module(statements[: len(statements) - len(shown)], [])
    exec(compile(quiet, source.filename, "exec"), shell.user_ns)
    exec(compile(ast.Interactive(shown), source.filename, "single"), shell.user_ns)
    kernel: Any = getattr(shell, "kernel", None)
    request = kernel.get_parent() if hasattr(kernel, "get_parent") else {}
    # The id that the page gave the cell.
    cell_id = str(request.get("metadata", {}).get("cellId", ""))
    # Ranks have no magics.
    lines = code.splitlines()
    for node in statements:
        if "get_ipython()" in ast.unparse(node):
            first, end = node.lineno - 1, node.end_lineno or node.lineno
            lines[first:end] = [""] * (end - first)
    EVERYWHERE[cell_id or text] = "\n".join(lines), source
