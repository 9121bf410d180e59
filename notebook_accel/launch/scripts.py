"""Write a run's function, or the cells of a ``%%accelerate`` session, as a script for torchrun.

The script of a function has those statements of the notebook's cells, in their order, that made
what the function uses, and then the call of the function::

    def train(size): ...      the function          -> used: torch, images
    images = images / 16      what made its globals -> kept, and what made `images` before
    import torch                                    -> kept
    run = notebook_launcher() what launches         -> left out
    best = run[0]             what uses a launch    -> best = torch.load("best.pt")

It never has data. What no statement can make again is loaded by a line that says so.

The script of a session has such statements for what its cells use of the notebook, and the cells::

    In[1]  import torch                    the script imports torch: In[4] uses it
    In[4]  %%accelerate                    each cell that all ranks have run to its end
           model = torch.nn.Linear(2, 1)
    In[5]  %%accelerate --write train.py
           model(torch.ones(2))            the cell itself, last
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import keyword
import linecache
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.launch.payload.cells import CellSource
from notebook_accel.launch.text import used_names

# The attribute by which something that is called says why no script can call it, and what to do.
_NO_SCRIPT = "_notebook_accel_no_script"
# A script is text to read: a longer literal is data.
_MAX_LITERAL = 1000
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_COMPOUND = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.Try, ast.With, ast.AsyncWith)
# What changes an object in place, or random generators, by the names of the field.
_CHANGES = re.compile(r".*_|shuffle|.*seed.*")
# Magics that run the code beside them.
_RUNNERS = ("prun", "run", "time", "timeit")
# Names of a session that its ranks have from the start.
_MADE_BY = {
    "rank": "rank = accelerator.process_index",
    "world_size": "world_size = accelerator.num_processes",
    "device": "device = accelerator.device",
}


# ---- of a function -------------------------------------------------------------------------


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
    if refusal := getattr(function, _NO_SCRIPT, None):
        raise NotebookAccelError(refusal)
    of_cells: Any = inspect.unwrap(function)
    known = getattr(of_cells, "__globals__", vars(sys.modules["__main__"]))
    texts = [source.text for source in sources]
    file_of_it = getattr(getattr(of_cells, "__code__", None), "co_filename", "")
    if not _is_public(of_cells) and file_of_it not in [source.filename for source in sources]:
        texts.append("".join(linecache.getlines(file_of_it)))  # of a plain program, or %run
    written = _launched_with(texts[0], known) if texts else {}
    values = {"function": function, **{f"args[{i}]": arg for i, arg in enumerate(args)}}
    called, *given = (_expression(label, one, known, written) for label, one in values.items())
    for key, value in kwargs.items():
        text = _expression(f"kwargs[{key!r}]", value, known, written)
        is_name = key.isidentifier() and not keyword.iskeyword(key)
        given.append(f"{key}={text}" if is_name else f"**{{{key!r}: {text}}}")
    call = f"{called}({', '.join(given)})"
    lines = _lines_for(used_names.names_of(call).used, texts, known)
    body = f'{lines}\n\nif __name__ == "__main__":\n    {call}'
    what = getattr(function, "__name__", "function")
    return _script_text(body, what=what, world_size=world_size, file=file)


def _script_text(body: str, *, what: str, world_size: int, file: str) -> str:
    """Return a whole script: a docstring that says how to run it, and ``body``."""
    run_it = f"Run it with: torchrun --nproc_per_node={world_size} {file}"
    return f'"""{what}, exported from a notebook.\n\n{run_it}\n"""\n\n' + body.strip("\n") + "\n"


class _Statement:
    """A top-level statement of a cell.

    It uses the names ``used`` at once, and the names ``later`` when what it defines is called.
    """

    def __init__(self, node: ast.stmt, text: str) -> None:
        names = used_names.names_of(ast.unparse(node))
        used = names.used - vars(builtins).keys()
        head = ast.parse(ast.unparse(node))
        for part in ast.walk(head):
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                part.body = [ast.Pass()]
        is_function = isinstance(getattr(node, "value", None), ast.Lambda)
        at_once = set() if is_function else used_names.names_of(ast.unparse(head)).used
        self.node, self.text = node, text
        self.used, self.later = used & at_once, used - at_once
        self.assigned = names.assigned
        self.keeps_older = isinstance(node, ast.Import) or bool(names.assigned - names.certain)
        self.is_made = True


def _lines_for(names: Collection[str], cells: Sequence[str], known: Mapping[str, Any]) -> str:
    """Return the statements of cells that make global variables, and what these need in turn."""
    statements = _statements(cells, known)
    needed = _with_readers(names, statements)
    results: set[str] = set()
    kept: list[str] = []
    while statements:
        one = statements.pop()
        made = one.assigned & needed
        if not one.is_made:
            results |= made
            needed -= made
        elif made or _changes(one, needed, known):
            if isinstance(one.node, _IMPORTS) and one.text in kept:
                kept.remove(one.text)  # once, where it is first
            kept.append(one.text)
            if not one.keeps_older:
                needed -= made
            needed |= _with_readers(one.used, statements)
    first = [_first(name, known, results) for name in sorted(needed & known.keys() | results)]
    if any(" = torch.load(" in line for line in first):
        first.insert(0, "import torch")
    rest = (text for text in reversed(kept) if text not in first)
    lines = [*dict.fromkeys(first), *rest]
    kinds = []
    for line in lines:
        node = ast.parse(line).body[0]
        kinds.append(2 if isinstance(node, _DEFINITIONS) else int(isinstance(node, _IMPORTS)))
    gaps = [2 if 2 in pair else int(pair[0] != pair[1]) for pair in itertools.pairwise(kinds)]
    return "".join(line + "\n" * (1 + gap) for line, gap in zip(lines, [*gaps, 0], strict=False))


def _statements(cells: Sequence[str], known: Mapping[str, Any]) -> list[_Statement]:
    """Return the statements of all cells in their order; of the newest, those up to its launch."""
    found: list[_Statement] = []
    unmade, there = {"get_ipython"}, {*known}
    for cell in reversed(cells):
        nodes = [*_nodes(cell)]
        ends = [i for i, (node, _) in enumerate(nodes, 1) if _launches(node, known)]
        for node, text in nodes[: ends[-1] if ends and cell is cells[0] else None]:
            one = _Statement(node, text)
            if _launches(node, known) or one.used & unmade or one.used - there:
                one.is_made = False  # the last: it failed in the notebook as well
            there |= one.assigned
            unmade = unmade - one.assigned if one.is_made else unmade | one.assigned
            found.append(one)
    return found


def _nodes(cell: str) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement of a cell with its text; none if the cell is not Python."""
    lines, begin = cell.encode().split(b"\n"), 0
    for node in used_names.parsed(cell).body:
        end = node.end_lineno or node.lineno
        if re.match(r"get_ipython\(\).run_cell_magic\('(time|capture)'", ast.unparse(node)):
            yield from _nodes(node.value.args[-1].value)  # type: ignore[attr-defined]
        elif node.lineno == begin or b";" in lines[end - 1][node.end_col_offset :]:
            yield node, ast.unparse(node)  # one of several on a line
        else:  # with the comments above it
            yield node, b"\n".join(lines[begin:end]).decode().strip()
        begin = end


def _launches(node: ast.stmt, known: Mapping[str, Any]) -> bool:
    return not isinstance(node, (*_DEFINITIONS, *_IMPORTS)) and any(
        _is_launch(part, known) for part in ast.walk(node)
    )


def _is_launch(node: ast.AST, known: Mapping[str, Any]) -> bool:
    name = getattr(node, "id", getattr(node, "attr", None))
    called = getattr(known.get(str(name)), "__name__", name)
    return called in ("notebook_launcher", "launch", "attach", "last_run")


def _with_readers(names: Collection[str], before: Sequence[_Statement]) -> set[str]:
    """Return names, and those that the newest of these functions use when they are called."""
    found = [*names]
    for name in found:  # it grows
        makers = (one.later for one in reversed(before) if name in one.assigned)
        found += next(makers, frozenset()) - {*found}
    return {*found}


def _changes(one: _Statement, needed: set[str], known: Mapping[str, Any]) -> bool:
    """Return whether a statement changes an object that is needed, or the random generators."""
    code = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    data = {name for name in needed if not isinstance(known.get(name), code)}
    if isinstance(one.node, _COMPOUND):
        return bool(one.used & data)
    if isinstance(one.node, ast.Expr) and isinstance(one.node.value, ast.Call):
        owner, _, called = ast.unparse(one.node.value.func).rpartition(".")
        changes = _CHANGES.fullmatch(called) and (one.used & data or "seed" in called)
        return bool(changes) or re.split(r"\W", owner)[0] in data
    targets = getattr(one.node, "targets", [getattr(one.node, "target", None)])
    return any(one and re.split(r"\W", ast.unparse(one))[0] in needed for one in targets)


def _first(name: str, known: Mapping[str, Any], results: Collection[str]) -> str:
    """Return the line that makes a variable which no cell makes, or which is of a launch."""
    value: Any = known.get(name)
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" + f" as {name}" * (value.__name__ != name)
    if _is_public(value):
        own = str(value.__qualname__)
        return f"from {value.__module__} import {own}" + f" as {name}" * (own != name)
    if isinstance(value, (types.FunctionType, type)):
        raise NotebookAccelError(
            f"`{name}`, which the script needs, is not defined in a cell of this notebook: define "
            "it there, launch again, and export that run"
        )
    if _is_literal(value) and name not in results:
        return f"{name} = {value!r}"
    safe = "" if str(type(value)) == "<class 'torch.Tensor'>" else ", weights_only=False"
    save_it = f'# save it in the notebook first: torch.save({name}, "{name}.pt")'
    return f'{name} = torch.load("{name}.pt"{safe})  {save_it}'


def _launched_with(cell: str, known: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments as the newest launch of a cell writes them, by their labels."""
    found: dict[str, str] = {}
    for call in (part for node, _ in _nodes(cell) for part in ast.walk(node)):
        if isinstance(call, ast.Call) and _is_launch(call.func, known):
            named = {part.arg: part.value for part in call.keywords}
            args = named.get("args", call.args[1] if len(call.args) > 1 else None)
            for i, one in enumerate(getattr(args, "elts", [])):
                found[f"args[{i}]"] = ast.unparse(one)
            if isinstance(kwargs := named.get("kwargs"), ast.Dict):
                for key, one in zip(kwargs.keys, kwargs.values, strict=True):
                    found[f"kwargs[{key and ast.unparse(key)}]"] = ast.unparse(one)
    return found


def _expression(
    label: str, value: Any, known: Mapping[str, Any], written: Mapping[str, str]
) -> str:
    """Return an expression for the function or an argument of a launch."""
    if _is_literal(value):
        return repr(value)
    names = [
        name for name, one in known.items() if one is value and not used_names.is_history(name)
    ]
    own = getattr(value, "__name__", "")
    if names:
        return own if own in names else names[0]
    if label in written:
        return written[label]
    raise NotebookAccelError(
        f"`{label}` ({type(value).__name__}) has no name in the notebook by which a script could "
        "make it: assign it to a variable at the top of a cell, launch again, and export that run"
    )


def _is_public(value: Any) -> bool:
    """Return whether a script can import the value by its own name from its module."""
    try:
        module, name = value.__module__, value.__qualname__
        return module != "__main__" and getattr(sys.modules[module], name) is value
    except Exception:  # whatever a user's class does
        return False


def _is_literal(value: Any) -> bool:
    """Return whether ``repr(value)`` is a short expression of an equal value."""
    try:
        text = repr(value) if type(value).__module__ == "builtins" else ""
        return 0 < len(text) <= _MAX_LITERAL and bool(ast.literal_eval(text) == value)
    except Exception:  # of objects in it, or not a number
        return False


# ---- of a session --------------------------------------------------------------------------


def script_of_cells(
    cells: Mapping[int, str],
    *,
    namespace: Mapping[str, Any],
    sources: Sequence[str],
    transform: Callable[[str], str],
    world_size: int,
    mixed_precision: str | None,
    file: str,
) -> str:
    """Return the text of a script that does what the cells do, one after the other.

    Args:
        cells: by execution number; the highest is the cell with ``--write``.
        sources: the notebook's own cells, newest first, for functions and classes.
        transform: turns IPython's syntax into Python.

    Raises:
        ConfigError: a cell has code that a script cannot have.
        NotebookAccelError: a function or class that is needed was not defined in a cell.
    """
    texts = {number: _plain(number, cells[number], transform) for number in sorted(cells)}
    last = max(texts)
    texts[last] = _shown_at_the_end(texts[last])
    used = used_names.names_of("\n".join(texts.values())).used
    provided = used & {"display", *used_names.PROVIDED}
    needed = {name for name in used & namespace.keys() if not used_names.is_history(name)}
    needed -= {*provided, *used_names.OF_IPYTHON}
    given = [line for name, line in _MADE_BY.items() if name in provided]
    if given or "accelerator" in provided:
        of_plan = f"mixed_precision={mixed_precision!r}" if mixed_precision else ""
        head = "from notebook_accel import Accelerator\n"
        given = [head, f"accelerator = Accelerator({of_plan})", *given]
    if "display" in provided:
        given.insert(0, "from IPython.display import display\n")
    blocks = [_lines_for(needed, sources, namespace), "\n".join([*given, ""])]
    blocks += [f"# ---- In[{number}]\n{text.strip()}\n" for number, text in texts.items()]
    body = "\n".join(block for block in blocks if block.strip())
    text = _script_text(body, what=f"In[{last}]", world_size=world_size, file=file)
    try:
        compile(text, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = text.splitlines()[(error.lineno or 1) - 1].strip()
        raise ConfigError(
            f"--write {file}: {error.msg}, at `{line}`: a cell can have what a script cannot; put "
            "it into a function, or into a plain cell of the notebook"
        ) from None
    return text


def _plain(number: int, text: str, transform: Callable[[str], str]) -> str:
    """Drop magics and future imports; ConfigError for a magic that runs code or gives a value."""
    text = used_names.without_watcher(text)
    code = transform(text)
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return text  # the whole script is compiled, and says what is wrong
    lines = code.split("\n")
    for node in body:
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        magic = ast.unparse(node) if "get_ipython()." in ast.unparse(node) else ""
        if not magic and not is_future:
            continue
        if any(f"run_line_magic('{name}'" in magic for name in _RUNNERS) or "=" in magic[:20]:
            raise ConfigError(
                f"--write: In[{number}] has a line of IPython that a script cannot have: "
                f"`{text.splitlines()[node.lineno - 1].strip()}`; write it in plain Python"
            )
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        lines[first:last] = [""] * (last - first)
        if magic:
            lines[first] = f"# left out: {text.splitlines()[first].strip()}"
    return "\n".join(lines)


def _shown_at_the_end(text: str) -> str:
    """Return a cell's source with its last expression put into ``print(...)``."""
    body = ast.parse(text).body
    last = body[-1] if body else None
    if not isinstance(last, ast.Expr) or last.col_offset or text.rstrip().endswith(";"):
        return text
    if isinstance(last.value, ast.Call) and ast.unparse(last.value.func) in ("print", "display"):
        return text
    before = text.split("\n")[: last.lineno - 1]
    is_tuple = isinstance(last.value, ast.Tuple)  # maybe without brackets
    value = ast.unparse(last.value) if is_tuple else ast.get_source_segment(text, last.value)
    return "\n".join([*before, f"print({value})"])
