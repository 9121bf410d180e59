"""Write a run's function as a script that torchrun starts.

The script has those statements of the notebook's cells, in their order, that made what the function
uses, and then the call of the function::

    def train(size): ...      the function          -> used: torch, images
    images = images / 16      what made its globals -> kept, and what made `images` before
    import torch                                    -> kept
    run = notebook_launcher() what launches         -> left out
    best = run[0]             what uses a launch    -> best = torch.load("best.pt")

It never has data. What no statement can make again is loaded by a line that says so.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import inspect
import itertools
import keyword
import linecache
import math
import re
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.text.used_names import is_history, names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from notebook_accel.launch.payload import CellSource

# The attribute by which something that is called says why no script can call it, and what to do.
_NO_SCRIPT = "_notebook_accel_no_script"
# A script is text to read: a longer literal is data.
_MAX_LITERAL = 1000
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_COMPOUND = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.Try, ast.With, ast.AsyncWith)
# What changes an object in place, or random generators, by the names of the field.
_CHANGES = re.compile(r".*_|shuffle|.*seed.*")
_SAVE_IT = "  # save it in the notebook first: "
_HEAD = '''"""{what}, exported from a notebook.

Run it with: torchrun --nproc_per_node={world_size} {file}
"""
'''


def script_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    world_size: int,
    file: str,
    sources: Sequence[CellSource] = (),
) -> str:
    """Return the text of a script that calls ``function(*args, **kwargs)``."""
    refusal = getattr(function, _NO_SCRIPT, None)
    if refusal is not None:
        raise NotebookAccelError(refusal)
    of_cells: Any = inspect.unwrap(function)
    known = getattr(of_cells, "__globals__", vars(sys.modules["__main__"]))
    texts = [source.text for source in sources]
    if not texts and hasattr(of_cells, "__code__"):  # a plain program
        texts = ["".join(linecache.getlines(of_cells.__code__.co_filename))]
    written = _launched_with(texts[0], known) if texts else {}
    called = _expression("function", function, known, written)
    given = [_expression(f"args[{i}]", arg, known, written) for i, arg in enumerate(args)]
    for key, value in kwargs.items():
        text = _expression(f"kwargs[{key!r}]", value, known, written)
        is_name = key.isidentifier() and not keyword.iskeyword(key)
        given.append(f"{key}={text}" if is_name else f"**{{{key!r}: {text}}}")
    call = f"{called}({', '.join(given)})"
    body = f'\n\nif __name__ == "__main__":\n    {call}\n'
    lines = lines_for(names_of(call).used, texts, known)
    what = getattr(function, "__name__", "function")
    return script_text(lines + body, what=what, world_size=world_size, file=file)


def script_text(body: str, *, what: str, world_size: int, file: str) -> str:
    """Return a whole script: a docstring that says how to run it, future imports, ``body``."""
    head = _HEAD.format(what=what, world_size=world_size, file=file)
    lines = body.split("\n")
    future = sorted({line for line in lines if line.startswith("from __future__ import")})
    rest = "\n".join(line for line in lines if line not in future)
    return "\n".join([head, *future, rest.strip("\n"), ""])


@dataclass(frozen=True)
class _Statement:
    """A top-level statement of a cell."""

    node: ast.stmt
    text: str
    used: frozenset[str]
    at_once: frozenset[str]
    assigned: frozenset[str]
    is_made: bool
    keeps_older: bool


def lines_for(names: Collection[str], cells: Sequence[str], known: Mapping[str, Any]) -> str:
    """Return the statements of cells that make global variables, and what these need in turn."""
    statements = _statements(cells, known)
    needed = _with_readers(names, statements, len(statements))
    kept: list[str] = []
    for number in reversed(range(len(statements))):
        one = statements[number]
        made = one.assigned & needed
        if not made and not _changes(one, needed, known):
            continue
        if one.is_made:
            if isinstance(one.node, _IMPORTS) and one.text in kept:
                kept.remove(one.text)  # once, where it is first
            kept.append(one.text)
            if not one.keeps_older:
                needed -= made - one.at_once
            needed |= _with_readers(one.at_once, statements, number)
        elif made:
            kept += [_loaded(name, known) for name in sorted(made)]
            needed -= made
    first = [_first(name, known) for name in sorted(needed)]
    lines = [*(line for line in first if line and line not in kept), *reversed(kept)]
    if any(f"{_SAVE_IT}torch" in line for line in lines):
        lines = ["import torch", *(line for line in lines if line != "import torch")]
    return _spaced(lines)


def _spaced(lines: Sequence[str]) -> str:
    kinds = [_num_blank_lines(line) for line in lines]
    gaps = [2 if 2 in pair else int(pair[0] != pair[1]) for pair in itertools.pairwise(kinds)]
    return "".join(line + "\n" * (1 + gap) for line, gap in zip(lines, [*gaps, 0], strict=False))


def _num_blank_lines(line: str) -> int:
    node = ast.parse(line).body[0]
    return 2 if isinstance(node, _DEFINITIONS) else int(isinstance(node, _IMPORTS))


def _statements(cells: Sequence[str], known: Mapping[str, Any]) -> list[_Statement]:
    """Return the statements of all cells in their order; of the newest, those up to its launch."""
    found: list[_Statement] = []
    unmade: set[str] = set()
    there = {*known}
    for cell in reversed(cells):
        nodes = [*_nodes(cell)]
        ends = [i for i, (node, _) in enumerate(nodes) if _launches(node, known)]
        if cell is cells[0] and ends:
            nodes = nodes[: ends[-1] + 1]
        for node, text in nodes:
            names = names_of(ast.unparse(node))
            used, assigned = names.used - vars(builtins).keys(), names.assigned
            is_definition = isinstance(node, _DEFINITIONS)
            is_made = is_definition or not (
                # The last: it failed, as this statement did in the notebook.
                _launches(node, known) or "get_ipython" in used or used & unmade or used - there
            )
            there |= assigned
            unmade = unmade - assigned if is_made else unmade | assigned
            older = isinstance(node, (ast.Import, *_COMPOUND)) or bool(assigned - names.certain)
            found.append(
                _Statement(node, text, used, _at_once(node, used), assigned, is_made, older)
            )
    return found


def _is_definition(node: ast.stmt) -> bool:
    return isinstance(getattr(node, "value", node), (*_DEFINITIONS, ast.Lambda))


def _at_once(node: ast.stmt, used: frozenset[str]) -> frozenset[str]:
    if not _is_definition(node):
        return used
    head = copy.deepcopy(node)
    for part in ast.walk(head):
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            part.body = [ast.Pass()]
        elif isinstance(part, ast.Lambda):
            part.body = ast.Constant(None)
    return names_of(ast.unparse(head)).used & used


def _nodes(cell: str) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement of a cell with its text; none if the cell is not Python."""
    try:
        body = ast.parse(cell).body
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = cell.split("\n")
    for node in body:
        inner = re.match(r"get_ipython\(\).run_cell_magic\('(time|capture)'", ast.unparse(node))
        if inner is not None:
            yield from _nodes(node.value.args[-1].value)  # type: ignore[attr-defined]
            continue
        # With the comments above it; of several on a line, the statement alone.
        begin = max((one.end_lineno or 0 for one in body if one.lineno < node.lineno), default=0)
        is_alone = begin < node.lineno and not any(
            one is not node and one.lineno == node.end_lineno for one in body
        )
        text = "\n".join(lines[begin : node.end_lineno]).strip()
        yield node, text if is_alone else ast.unparse(node)


def _launches(node: ast.stmt, known: Mapping[str, Any]) -> bool:
    return not isinstance(node, (*_DEFINITIONS, *_IMPORTS)) and any(
        _is_launch(part, known) for part in ast.walk(node)
    )


def _is_launch(node: ast.AST, known: Mapping[str, Any]) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
    called = getattr(known.get(str(name)), "__name__", name)
    return name is not None and called in ("notebook_launcher", "launch", "attach", "last_run")


def _with_readers(names: Collection[str], statements: Sequence[_Statement], end: int) -> set[str]:
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            makers = (one for one in reversed(statements[:end]) if name in one.assigned)
            maker = next(makers, None)
            if maker is not None and _is_definition(maker.node):
                waiting += maker.used
    return found


def _changes(one: _Statement, needed: set[str], known: Mapping[str, Any]) -> bool:
    """Return whether a statement changes an object that is needed, or the random generators."""
    node = one.node
    code = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    data = {name for name in needed if not isinstance(known.get(name), code)}
    if not one.is_made or isinstance(node, _DEFINITIONS):
        return False
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        owner, _, called = ast.unparse(node.value.func).rpartition(".")
        changes = _CHANGES.fullmatch(called) and (one.used & data or "seed" in called)
        return bool(changes) or re.split(r"\W", owner, maxsplit=1)[0] in data
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        roots = {re.split(r"\W", ast.unparse(target), maxsplit=1)[0] for target in targets}
        return bool(roots & data - one.assigned) or bool(roots & needed - one.assigned)
    return isinstance(node, _COMPOUND) and bool(one.used & data)


def _first(name: str, known: Mapping[str, Any]) -> str:
    """Return the line that makes a variable which no cell has made."""
    if name not in known or is_history(name) or hasattr(builtins, name):
        return ""
    value = known[name]
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" + f" as {name}" * (value.__name__ != name)
    if _is_public(value):
        own = value.__qualname__
        return f"from {value.__module__} import {own if own == name else f'{own} as {name}'}"
    if _is_literal(value):
        return f"{name} = {value!r}"
    return _loaded(name, known)


def _loaded(name: str, known: Mapping[str, Any]) -> str:
    """Return a line that loads a variable from a file, and says how to save it."""
    value = known.get(name)
    if isinstance(value, (types.FunctionType, type)):
        with contextlib.suppress(OSError, TypeError):  # it is in a file that no cell is
            text = inspect.getsource(value)
            if text.startswith(("@", "def ", "class ", "async def ")):
                return text.rstrip("\n")
        raise NotebookAccelError(
            f"`{name}`, which the script needs, is not defined in a cell of this notebook: define "
            "it there, launch again, and export that run"
        )
    is_tensor = type(value).__module__ == "torch" and type(value).__name__ == "Tensor"
    safe = "" if is_tensor else ", weights_only=False"
    return f'{name} = torch.load("{name}.pt"{safe}){_SAVE_IT}torch.save({name}, "{name}.pt")'


def _launched_with(cell: str, known: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments as the newest launch of a cell writes them, by their labels."""
    found: dict[str, str] = {}
    calls = (
        part
        for node, _ in _nodes(cell)
        for part in ast.walk(node)
        if isinstance(part, ast.Call) and _is_launch(part.func, known)
    )
    for call in calls:
        named = {part.arg: part.value for part in call.keywords}
        args = named.get("args", call.args[1] if len(call.args) > 1 else None)
        if isinstance(args, (ast.Tuple, ast.List)):
            found |= {f"args[{i}]": ast.unparse(one) for i, one in enumerate(args.elts)}
        kwargs = named.get("kwargs")
        if isinstance(kwargs, ast.Dict):
            pairs = zip(kwargs.keys, kwargs.values, strict=True)
            found |= {f"kwargs[{ast.unparse(key)}]": ast.unparse(v) for key, v in pairs if key}
    return found


def _expression(
    label: str, value: Any, known: Mapping[str, Any], written: Mapping[str, str]
) -> str:
    """Return an expression for the function or an argument of a launch."""
    if _is_literal(value) and not isinstance(value, (list, tuple, set, dict)):
        return repr(value)
    names = [name for name, one in known.items() if one is value and not is_history(name)]
    own = getattr(value, "__name__", "")
    if names or (own and known.get(own) is value):
        return own if known.get(own) is value else names[0]
    if label in written:
        return written[label]
    if _is_literal(value):
        return repr(value)
    if inspect.ismethod(value):
        return f"{_expression(label, value.__self__, known, written)}.{value.__name__}"
    raise NotebookAccelError(
        f"`{label}` ({type(value).__name__}) has no name in the notebook by which a script could "
        "make it: assign it to a variable at the top of a cell, launch again, and export that run"
    )


def _is_public(value: Any) -> bool:
    """Return whether a script can import the value by its own name from its module."""
    try:
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        name = str(getattr(value, "__qualname__", ""))
    except Exception:  # whatever a user's class does
        return False
    if module is None or module.__name__ == "__main__" or not name.isidentifier():
        return False
    return getattr(module, name, None) is value


def _is_literal(value: Any) -> bool:
    """Return whether ``repr(value)`` is a short expression of an equal value of the same type."""
    if type(value) in (dict, list, tuple, set):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        is_plain = all(map(_is_literal, parts))
    elif type(value) is float:
        is_plain = math.isfinite(value)
    else:
        is_plain = value is None or type(value) in (bool, int, str, bytes)
    return is_plain and len(repr(value)) <= _MAX_LITERAL
