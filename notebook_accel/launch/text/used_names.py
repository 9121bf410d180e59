"""Find which names a cell uses from earlier cells, and which it assigns, by reading its source.

    import math              assigns math
    total = rank + 1         uses rank, assigns total
    print(total)             uses print; total is not used: the cell itself has assigned it
    rows.append(total)       uses rows

Python's own compiler tells names of the cell from local names of functions and comprehensions. What
a cell does by ``exec`` or by magics is not seen, except for names in the text of a magic: ``%time
f(x)`` uses ``f`` and ``x``.
"""

from __future__ import annotations

import ast
import copy
import dis
import re
import sys
import types
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

# What a cell of the magic finds in its ranks. A name of the notebook that is called so counts from
# its next assignment on.
PROVIDED = ("accelerator", "device", "rank", "world_size")
# IPython's own names for what was typed and shown.
_HISTORY = re.compile(r"_+|_i+|_i?\d+|_[iods]h|_exit_code|In|Out")
# What IPython puts into a notebook beside its history.
OF_IPYTHON = ("exit", "get_ipython", "open", "quit")
_OF_PYTHON = re.compile(r"__.*__|__+")
# A name, but not the letters before a text, as in f"{x}".
_IDENTIFIER = re.compile(r"(?![rbfuRBFU]{1,2}['\"])\b[^\W\d]\w*")
# Magics that run the rest of the cell as it is, and look on.
_WATCHER = re.compile(r"\A\s*%%(time|capture|prun)\b[^\n]*\n")


def is_history(name: str) -> bool:
    """Return whether IPython keeps inputs or outputs under this name: ``_i3``, ``Out``."""
    return _HISTORY.fullmatch(name) is not None


def without_watcher(text: str) -> str:
    """Return the source of a cell without a first line such as ``%%time``."""
    return _WATCHER.sub("", text)


def names_of(text: str) -> CellNames:
    """Return the names that a cell uses and assigns; no names for a text that is not Python."""
    return names_in(parsed(text).body)


def names_in(statements: Sequence[ast.stmt]) -> CellNames:
    """Return the names that statements of a cell use and assign."""
    names = CellNames()
    try:
        names.read(statements, names.certain)
    except _NO_PYTHON:
        return CellNames()
    return names


def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a cell; an empty one for a cell that is no Python."""
    try:
        return ast.parse(text)
    except _NO_PYTHON:
        return ast.Module([], [])


def submodules(dotted: Iterable[str], namespace: Mapping[str, Any]) -> frozenset[str]:
    """Return the imported modules that dotted names reach through a package in ``namespace``.

    ``import xml.dom.minidom`` assigns ``xml`` only. A process that is given ``xml`` must import
    ``xml.dom`` and ``xml.dom.minidom`` too before it can use them.
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


_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_STORES = {"STORE_NAME", "STORE_GLOBAL"}
_DELETES = {"DELETE_NAME", "DELETE_GLOBAL"}
# Code that runs where it stands, and has a scope of its own for its variables alone.
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
# In the place of a block, so that what stands around it can be compiled alone.
_BLOCK = ast.parse("__block__()").body
# What parsing a text raises that is none.
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass
class CellNames:
    """The global names that a cell uses and assigns; ``certain`` ones it assigns in any case."""

    used: set[str] = field(default_factory=set)
    dotted: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    certain: set[str] = field(default_factory=set)

    def read(self, statements: Sequence[ast.stmt], own: set[str]) -> None:
        """Add the names of statements, in their order; ``own`` are those assigned before them."""
        for statement in statements:
            if not isinstance(statement, (ast.Break, ast.Continue)):
                self._statement(statement, own)

    def _statement(self, node: ast.stmt, own: set[str]) -> None:
        is_definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        head: Any = copy.copy(node)
        blocks: list[tuple[list[ast.stmt], str | None]] = []
        for name in () if is_definition else ("body", "orelse", "finalbody"):
            if getattr(node, name, []):
                blocks.append((getattr(node, name), None))
                setattr(head, name, _BLOCK)
        for name in ("handlers", "cases"):
            parts = [copy.copy(part) for part in getattr(node, name, [])]
            if parts:
                blocks += [(part.body, getattr(part, "name", None)) for part in parts]
                setattr(head, name, parts)
            for part in parts:
                part.body = _BLOCK
        self._read_head(head, own)
        # Whether a branch runs is not known: what it assigns is its own alone.
        for block, caught in blocks:
            is_certain = isinstance(node, (ast.With, ast.AsyncWith))
            self.read(block, own if is_certain else own | ({caught} if caught else set()))

    def _read_head(self, node: ast.stmt, own: set[str]) -> None:
        """Read a statement, but not the blocks of statements in it."""
        for part in ast.walk(node):
            if dotted := _dotted(part):
                self.dotted.add(dotted)
            for text in texts_for_ipython(part):
                # Any word may be a name; Python keeps names in this form.
                names = _IDENTIFIER.findall(unicodedata.normalize("NFKC", text))
                self.used |= set(names) - own
                self.dotted |= names_of(text).dotted
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            source = sys.modules.get(node.module or "")
            known = {} if source is None else vars(source)
            public = [each for each in known if not each.startswith("_")]
            exported = set(known.get("__all__", public))
            self.assigned |= exported
            own |= exported
        module = ast.Module([node], [])
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._code(compile(module, "", "exec", flags, dont_inherit=True), own)

    def _code(self, code: types.CodeType, own: set[str], local: set[str] | None = None) -> None:
        """Follow the instructions of compiled code in their order, and record the names in them."""
        for step in dis.get_instructions(code):
            name = step.argval
            if isinstance(name, types.CodeType):
                runs_here = local is None and name.co_name in _COMPREHENSIONS
                self._code(name, own, None if runs_here else set())
            elif step.opname == "STORE_NAME" and local is not None:
                local.add(name)
            elif step.opname in _LOADS | _STORES | _DELETES and not _OF_PYTHON.fullmatch(name):
                if step.opname not in _STORES and name not in own | (local or set()):
                    self.used.add(name)
                if step.opname not in _LOADS:
                    self.assigned.add(name)
                    if local is None:
                        (own.discard if step.opname in _DELETES else own.add)(name)


def _dotted(node: ast.AST) -> str:
    """Return a node such as ``os.path`` as text; "" for any other one."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if names and isinstance(node, ast.Name) else ""


@lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names that a code object and its nested functions may look up as globals."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    steps = dis.get_instructions(code)
    own = frozenset(step.argval for step in steps if step.opname in _LOADS)
    return own.union(*map(global_names, inner))


def texts_for_ipython(node: ast.AST) -> list[str]:
    """Return the texts that a transformed magic or shell command passes to IPython."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr=method),
            args=arguments,
        ):
            # The first of several is the name of a magic.
            texts = [str(one.value) for one in arguments[-2:] if isinstance(one, ast.Constant)]
            return texts[1:] if method.endswith("magic") and len(arguments) == 2 else texts
    return []
