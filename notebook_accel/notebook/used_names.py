"""Which names a cell uses from before and assigns: read from its source.

    import math              assigns math
    total = rank + 1         uses rank, assigns total
    print(total)             uses print; total is the cell's own by now
    rows.append(total)       uses rows

What a cell does by ``exec`` or by magics is not seen, apart from names that stand in the text of a
magic: in ``%time f(x)`` are ``f`` and ``x``. Which names in functions and classes are their own,
and which are the cell's, Python's ``symtable`` knows.
"""

from __future__ import annotations

import ast
import re
import symtable
import sys
import types
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "CellNames",
    "is_history",
    "names_of",
    "submodules",
    "without_watcher",
]

# IPython's own names for what was typed and shown.
_HISTORY = re.compile(r"_+|_i+|_i?\d+|_[iods]h|_exit_code|In|Out")
# A name, but not the letters before a text, as in f"{x}".
_IDENTIFIER = re.compile(r"(?:(?<!\$)\b[rbfuRBFU]{1,2}(?=['\"]))|\b([^\W\d]\w*)")
# In the place of which IPython puts a value.
_EXPANDED = re.compile(r"\{[^{}]*\}|\$\w+")
# Magics that run the rest of the cell as it is, and look on.
_WATCHER = re.compile(r"\A\s*%%(time|capture|prun)\b[^\n]*\n")


def is_history(name: str) -> bool:
    """Whether IPython keeps inputs or outputs under this name."""
    return _HISTORY.fullmatch(name) is not None


def without_watcher(text: str) -> str:
    """The text of a cell without a first line such as ``%%time``."""
    return _WATCHER.sub("", text)


@dataclass(frozen=True)
class CellNames:
    """Names of a cell.

    Attributes:
        used: those that the cell reads and has not certainly assigned before.
        dotted: names with attributes, as they stand anywhere in the cell: "os.path.join".
        assigned: those that it assigns or deletes at its top, or as ``global`` in a function.
        certain: of those, the ones that it has assigned whenever it comes to its end;
            loops are taken to run.
    """

    used: frozenset[str] = frozenset()
    dotted: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    certain: frozenset[str] = frozenset()


def names_of(text: str) -> CellNames:
    """The names of a cell, of which IPython's own syntax was turned into Python.

    A text that is no Python uses and assigns nothing.
    """
    try:
        tree = ast.parse(text)
        reader = _Reader(symtable.symtable(text, "", "exec"))
    except _NO_PYTHON:
        return CellNames()
    certain: set[str] = set()
    reader.block(tree.body, certain)
    return CellNames(
        used=frozenset(reader.used),
        dotted=frozenset(reader.dotted),
        assigned=frozenset(reader.assigned),
        certain=frozenset(certain),
    )


def submodules(dotted: Iterable[str], namespace: Mapping[str, Any]) -> frozenset[str]:
    """The modules that these names reach by a package in ``namespace``.

    ``import xml.dom.minidom`` assigns ``xml`` alone: who is given that has not imported the rest.
    """
    found: set[str] = set()
    for names in dotted:
        first, *rest = names.split(".")
        package = namespace.get(first)
        name = package.__name__ if isinstance(package, types.ModuleType) else ""
        for part in rest:
            name = f"{name}.{part}"
            if sys.modules.get(name) is None:
                break
            found.add(name)
    return frozenset(found)


def _definitions(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """The functions and classes of a cell, also those in comprehensions."""
    for child in table.get_children():
        if child.get_name() in ("listcomp", "setcomp", "dictcomp", "genexpr"):
            yield from _definitions(child)
        else:
            yield child


def _looked_up(table: symtable.SymbolTable) -> Iterator[str]:
    """Names that a function or a class looks up among the globals."""
    is_class = table.get_type() == "class"
    for symbol in table.get_symbols():
        # A class that assigns a name may have looked it up among the globals before: ``lr = lr``.
        may_be_global = symbol.is_global() or (is_class and symbol.is_local())
        if may_be_global and symbol.is_referenced():
            yield symbol.get_name()
    for child in table.get_children():
        yield from _looked_up(child)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
# What parsing a text raises that is none.
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


class _Reader:
    """Goes through statements in their order, with the names that are certainly there so far.

    Args:
        table: Python's own account of the cell's names.
    """

    def __init__(self, table: symtable.SymbolTable) -> None:
        # By the line where a function or class at the top of the cell begins.
        self._looked_up: dict[int, set[str]] = {}
        for child in _definitions(table):
            self._looked_up.setdefault(child.get_lineno(), set()).update(_looked_up(child))
        self.used: set[str] = set()
        self.dotted: set[str] = set()
        self.assigned: set[str] = set()

    def block(self, statements: Sequence[ast.stmt], own: set[str]) -> None:
        """Read statements that run one after the other; adds to ``own`` what they assign."""
        for statement in statements:
            self._statement(statement, own)

    def _statement(self, node: ast.stmt, own: set[str]) -> None:
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [part.body for part in getattr(node, "handlers", [])]
        blocks += [part.body for part in getattr(node, "cases", [])]
        is_definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if is_definition or not any(blocks):
            self._read(node, own)
            own |= self._bound(node)
            return
        # What runs first, such as the header of a loop or the context of a ``with``.
        inside = [inner for block in blocks for inner in block]
        for part in ast.iter_child_nodes(node):
            if part not in inside:
                self._read(part, own, skip=inside)
                own |= self._bound(part, skip=inside)
        # Whether a branch runs is not known: what it assigns is its own alone.
        for block in blocks:
            self.block(block, own if isinstance(node, (ast.With, ast.AsyncWith)) else set(own))

    def _read(self, node: ast.AST, own: set[str], skip: Iterable[ast.AST] = ()) -> None:
        """Note the names that a node reads, functions inside of it included."""
        read: set[str] = set()
        declared: set[str] = set()
        rebound: set[str] = set()
        for part in _walk(node, skip):
            if isinstance(part, ast.Global):
                declared.update(part.names)
            for text in _texts_for_ipython(part) if isinstance(part, ast.Call) else ():
                read |= _names_in_magic(text)
                self.dotted |= names_of(text).dotted
            self.dotted |= _dotted(part)
            rebound |= _rebound(part)
        self.assigned |= declared
        # Of ``global n; n += 1`` the table says only that it assigns.
        read |= (declared & rebound) | self._found_outside(node, skip)
        self.used |= read - own

    def _found_outside(self, node: ast.AST, skip: Iterable[ast.AST] = ()) -> set[str]:
        """Names that a node reads and has not of its own."""
        read: set[str] = set()
        for part in _walk(node, skip, _parts_around):
            if isinstance(part, _DEFINITIONS):
                read |= self._looked_up.get(part.lineno, set())
            elif isinstance(part, _COMPREHENSIONS):
                # Not from the table: from Python 3.12 on it has no part for these.
                inside = set[str]()
                for child in ast.iter_child_nodes(part):
                    inside |= self._found_outside(child, [part.generators[0].iter])
                read |= inside.difference(*(_names_in(each.target) for each in part.generators))
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                read.add(part.id)
            else:
                read |= _rebound(part)
        return read

    def _bound(self, node: ast.AST, skip: Iterable[ast.AST] = ()) -> set[str]:
        """The names that a statement assigns here, not those inside of functions and classes."""
        found: set[str] = set()
        deleted: set[str] = set()
        for part in _walk(node, skip, _parts_here):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                found.add(part.id)
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Del):
                deleted.add(part.id)
            elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(part.name)
            elif isinstance(part, ast.ImportFrom) and part.names[0].name == "*":
                found |= _exported(part.module)
            elif isinstance(part, ast.alias) and part.name != "*":
                found.add((part.asname or part.name).partition(".")[0])
            elif isinstance(part, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and part.name:
                found.add(part.name)
        self.assigned |= found | deleted
        return found - deleted


def _rebound(node: ast.AST) -> set[str]:
    """The name that must be there for a node to assign or delete it."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del) else set()


def _dotted(node: ast.AST) -> set[str]:
    """The name with its attributes, where the node is one of these."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if not names or not isinstance(node, ast.Name):
        return set()
    return {".".join([node.id, *names])}


def _walk(
    node: ast.AST,
    skip: Iterable[ast.AST] = (),
    parts_of: Callable[[ast.AST], Iterable[ast.AST]] = ast.iter_child_nodes,
) -> Iterator[ast.AST]:
    """A node with all that is in it, apart from ``skip``; ``parts_of`` says what of a node counts
    as being in it."""
    skipped = set(map(id, skip))
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if id(part) not in skipped:
            yield part
            waiting += parts_of(part)


def _parts_around(node: ast.AST) -> Iterable[ast.AST]:
    """Of what has names of its own only what is evaluated around it, such as the defaults of a
    function; of other nodes all parts."""
    if isinstance(node, _COMPREHENSIONS):
        return [node.generators[0].iter]
    inside: Any = getattr(node, "body", []) if isinstance(node, _DEFINITIONS) else []
    inside = inside if isinstance(inside, list) else [inside]
    return [one for one in ast.iter_child_nodes(node) if one not in inside]


def _parts_here(node: ast.AST) -> Iterable[ast.AST]:
    """The parts of a node whose names are not those of a function, class or comprehension."""
    if isinstance(node, _DEFINITIONS):
        return []
    if isinstance(node, _COMPREHENSIONS):
        # Of a comprehension only ``:=`` assigns outside of it.
        return [one.target for one in ast.walk(node) if isinstance(one, ast.NamedExpr)]
    return ast.iter_child_nodes(node)


def _exported(name: str | None) -> set[str]:
    """What ``from module import *`` assigns; nothing where this process has not imported it."""
    module = sys.modules.get(name or "")
    known = {} if module is None else vars(module)
    return set(known.get("__all__", [each for each in known if not each.startswith("_")]))


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _texts_for_ipython(call: ast.Call) -> list[str]:
    """The texts of a magic or of a shell line: ``get_ipython().system('ls {folder}')``."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Call):
        return []
    owner = function.value.func
    if not isinstance(owner, ast.Name) or owner.id != "get_ipython":
        return []
    # The first of several is the name of a magic.
    texts = [part.value for part in call.args[-2:] if isinstance(part, ast.Constant)]
    texts = texts[1:] if function.attr.endswith("magic") and len(call.args) == 2 else texts
    return list(map(str, texts))


def _names_in_magic(text: str) -> set[str]:
    """Names in the text of a magic: Python, or a command into which IPython puts values."""
    used: frozenset[str] = frozenset()
    with suppress(*_NO_PYTHON):
        parts = ast.walk(ast.parse(text))
        constants = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
        used = names_of(text).used
        text = " ".join(_EXPANDED.findall(" ".join(constants)))
    # Python keeps names in this form.
    text = unicodedata.normalize("NFKC", text)
    return {name for name in _IDENTIFIER.findall(text) if name} | used
