"""The source of what cells define, and which globals it looks up."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import symtable
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["globals_of", "globals_read", "parsed", "source_of"]

# As symbol tables name them, between angle brackets or not.
_COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp", "genexpr")


def source_of(value: Any, cells: Sequence[str]) -> str | None:
    """The source of a function or class that stands on its own: no closure, no lambda."""
    made = value if isinstance(value, type) else inspect.unwrap(value)
    if getattr(made, "__closure__", None) or value.__name__ == "<lambda>":
        return None
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return _class_in_cells(value, cells) if isinstance(value, type) else None
    # The source makes a decorated function again if its decorators alone have made it. That is not
    # so for `functools.singledispatch`, since what was registered with it is written elsewhere.
    is_made_by_it = made is value or (
        source.startswith("@")
        and globals_of(value).get(value.__name__) is value
        and not hasattr(value, "dispatch")
    )
    return source if is_made_by_it else None


def parsed(text: str) -> ast.Module:
    """The statements of a cell; none of one with a magic, which is no Python."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _class_in_cells(value: type, cells: Sequence[str]) -> str | None:
    """The class statement in a cell; ``inspect`` finds classes only in modules that have a file."""
    for function in _functions(value):
        code = function.__code__
        text = "".join(linecache.getlines(code.co_filename))
        if source := _class_statement(text, value.__qualname__, code.co_firstlineno):
            return source
    found = (_class_statement(text, value.__qualname__) for text in cells)
    return next((source for source in found if source), None)


def _class_statement(text: str, name: str, line: int | None = None) -> str | None:
    """The last statement at the top of ``text`` that makes the class, around ``line`` if given."""
    for node in reversed(parsed(text).body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            if line is None or first <= line <= (node.end_lineno or first):
                return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return None


def globals_read(table: symtable.SymbolTable, *, at_once: bool = False) -> Iterator[str]:
    """The names that a definition looks up among its globals, and not among its own locals.

    Those of functions, classes and comprehensions inside of it are there, and those of its
    decorators, bases, defaults and annotations.

    Args:
        table: of the definition.
        at_once: only those that it looks up while its own statement runs: the body of a class and
            comprehensions run there and then, that of a function later.
    """
    is_top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_top or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        is_now = child.get_type() == "class" or child.get_name().strip("<>") in _COMPREHENSIONS
        if is_now or not at_once:
            yield from globals_read(child, at_once=at_once)


def globals_of(value: Any) -> Mapping[str, Any]:
    """The globals among which a function or class was defined."""
    functions = _functions(value)
    if functions:
        return functions[0].__globals__
    return vars(sys.modules[value.__module__])


def _functions(value: Any) -> list[types.FunctionType]:
    """The function itself; of a class those that it defines, not others that it has as values."""
    if not isinstance(value, type):
        return [part for part in [inspect.unwrap(value)] if isinstance(part, types.FunctionType)]
    parts = [inspect.unwrap(part) for part in vars(value).values() if callable(part)]
    return [
        part
        for part in parts
        if isinstance(part, types.FunctionType)
        and part.__module__ == value.__module__
        and part.__qualname__.startswith(f"{value.__qualname__}.")
    ]
