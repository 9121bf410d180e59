"""The notebook's own texts for the values of a launch, which ``run.export`` writes.

    In[1]  images = load()                                   images: this statement
           net = Net()                                       net: this one, until In[2]
    In[2]  fit(net)
    In[3]  set_seed(0)                                       the seed
           run = notebook_launcher(train, (Net(), images))   the first argument: ``Net()``

A statement counts where it would give the same value again: its cell has ended well, and no cell
has changed the value since, nor what the statement reads. That is judged from names. Of what learns
(it has a ``state_dict``) nearly all comes from what was done to it, which names may not show: there
no cell may have used it since, apart from looking at it and launching. Random numbers are drawn
anew.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import re
import sys
import types
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.control.export import Origin, Origins, is_public_name
from notebook_accel.notebook.failed_cells import failed_cells
from notebook_accel.notebook.sources import cell_numbers, cell_sources
from notebook_accel.notebook.used_names import LAUNCHERS, CellNames, called, names_of, only_looks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["origins_of_click", "origins_of_launch"]

# Statements that run once, and what in them may run more often, with names of its own.
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Expr)
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def origins_of_launch(
    shell: InteractiveShell | None, function: Callable[..., Any]
) -> Callable[[], Origins]:
    """What gives the origins of a launch's values, called whenever they are asked for.

    Args:
        shell: of the notebook, which launches now; None elsewhere.
        function: what it launches.
    """
    if shell is None:
        return Origins
    return partial(_CellOrigins, shell, _launch_in_cell(shell.user_ns, function))


def origins_of_click(shell: InteractiveShell | None, arguments: str) -> Callable[[], Origins]:
    """As :func:`origins_of_launch`, of a launch that no cell makes.

    Args:
        shell: of the notebook; None elsewhere.
        arguments: of the function, as they stand between the brackets of a call.
    """
    if shell is None:
        return Origins
    return partial(_CellOrigins, shell, _launch_by_click(shell, arguments))


class _CellOrigins(Origins):
    """The origins of values, as the notebook's cells stand now."""

    def __init__(self, shell: InteractiveShell, launch: _Launch | None) -> None:
        self._namespace: Mapping[str, Any] = shell.user_ns
        self._statements = _statements(shell)
        # Where nobody has watched, any cell may have failed.
        self._is_watched = failed_cells(shell) is not None
        self._launch = launch
        self._launch_order = next(
            (
                order
                for order, statement in enumerate(self._statements)
                if launch and (statement.file, statement.node.lineno) == (launch.file, launch.line)
            ),
            None,
        )

    def of_argument(self, key: int | str) -> Origin | None:
        if self._launch is None or self._launch_order is None:
            return None
        text = self._launch.arguments.get(key)
        if text is None:
            return None
        origin = self._origin(text, _names_in(text), self._launch_order)
        before = self._launch.values
        # The cell may have run again since, after one that changed them.
        if origin is None or any(before.get(name) is not now for name, now in origin.names.items()):
            return None
        return origin

    def of_global(self, name: str, value: Any) -> Origin | None:
        if not self._is_watched or self._namespace.get(name) is not value:
            return None
        for order in range(len(self._statements) - 1, -1, -1):
            made = self._statements[order]
            if made.may_change(name):
                return self._origin(made.text, made.names, order) if made.makes_values else None
        return None

    def changed_parts(self, name: str) -> set[str]:
        return {part for one in self._statements for part in one.parts_changed_of(name)}

    def of_seed(self) -> Origin | None:
        if self._launch is None or self._launch_order is None:
            return None
        last = self._launch_order - (0 if self._launch.is_click else 1)
        for order in range(last, -1, -1):
            statement = self._statements[order]
            if statement.names.sets_seed and isinstance(statement.node, _SIMPLE):
                return self._origin(statement.text, statement.names, order)
        return None

    def _origin(self, text: str, names: CellNames, order: int) -> Origin | None:
        """The text, where it would do now what it did in its place.

        Args:
            text: a statement or an expression.
            names: of the text.
            order: of the statement.
        """
        namespace, later = self._namespace, self._statements[order + 1 :]
        read = {name for name in names.used if name in namespace or not hasattr(builtins, name)}
        # At its top a script has no ``await``.
        if "await " in text:
            return None
        for name in read | names.assigned:
            if name not in namespace or _has_changed(name, namespace[name], later):
                return None
        return Origin(text, {name: namespace[name] for name in sorted(read)}, order)


def _has_changed(name: str, value: Any, later: Iterable[_Statement]) -> bool:
    """Whether one of the statements may have given the name, or its value, another one."""
    if isinstance(value, types.ModuleType) or is_public_name(value):
        # It was imported once more, at most.
        return False
    learns = hasattr(value, "state_dict") and not isinstance(value, type)
    return any(one.may_change(name) or (learns and one.may_teach(name)) for one in later)


# ---- the cells -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Statement:
    """A statement at the top of a cell.

    Attributes:
        file: of the cell.
        node: the statement.
        text: its source.
        has_run: whether its cell ended well.
    """

    file: str
    node: ast.stmt
    text: str
    has_run: bool

    @cached_property
    def names(self) -> CellNames:
        return names_of(self.text)

    @property
    def _is_magic(self) -> bool:
        return "get_ipython" in self.names.used

    @cached_property
    def _named_by_magic(self) -> frozenset[str]:
        """The names in a magic, which may change any of them: ``%time fit(model)``.

        Of `%%accelerate` those of its first line alone, where it pulls; its ranks have copies.
        """
        if not self._is_magic:
            return frozenset()
        for call in _calls(self.node):
            texts = [part.value for part in call.args if isinstance(part, ast.Constant)]
            if texts[:1] == ["accelerate"]:
                return frozenset(re.findall(r"\w+", str(texts[1])))
        return self.names.used

    @property
    def makes_values(self) -> bool:
        """Whether it has assigned values that do not depend on those before it."""
        if not isinstance(self.node, (ast.Assign, ast.AnnAssign)) or self.node.value is None:
            return False
        names = self.names
        depends = self._is_magic or names.changed or names.assigned & names.used
        return self.has_run and not depends

    def may_change(self, name: str) -> bool:
        """Whether it may give the name, or its value, another one."""
        names = self.names
        return name in names.assigned | names.changed | self._named_by_magic

    def may_teach(self, name: str) -> bool:
        """Whether it may change what learns and has that name: any use of it may."""
        if isinstance(self.node, _DEFINITIONS) or self._looks or self._launches:
            return False
        return name in self.names.used

    def parts_changed_of(self, name: str) -> set[str]:
        """The attributes of that name which it may change: ``f`` of ``Net`` in ``Net.f = g``.

        What a definition changes whenever it is called is not seen.
        """
        if isinstance(self.node, _DEFINITIONS) or name not in self.names.used | self.names.changed:
            return set()
        return {part for node in ast.walk(self.node) for part in _parts_changed(node, name)}

    @property
    def _looks(self) -> bool:
        is_expression = isinstance(self.node, ast.Expr) and not self.names.changed
        return is_expression and only_looks(self.node)

    @property
    def _launches(self) -> bool:
        calls = _calls(self.node) if isinstance(self.node, _SIMPLE) else []
        return any(called(call) in LAUNCHERS for call in calls)


def _parts_changed(node: ast.AST, name: str) -> Iterator[str]:
    """The attributes of that name which this one node changes, by assignment or call."""
    changed: ast.AST | None = None
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        changed = node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changed = node.func.value
    elif isinstance(node, ast.Call) and called(node) == "setattr" and len(node.args) == 3:
        owner, part, _ = node.args
        if isinstance(owner, ast.Name) and owner.id == name and isinstance(part, ast.Constant):
            yield str(part.value)
    while isinstance(changed, (ast.Attribute, ast.Subscript)):
        inner = changed.value
        if isinstance(changed, ast.Attribute) and isinstance(inner, ast.Name) and inner.id == name:
            yield changed.attr
        changed = inner


def _statements(shell: InteractiveShell) -> list[_Statement]:
    """What stands at the top of the cells, in their order."""
    failed = failed_cells(shell) or ()
    numbers = cell_numbers(shell)
    found: list[_Statement] = []
    for source in reversed(cell_sources(shell)):
        has_run = numbers[source.filename] not in failed
        # What IPython made of it is there, too.
        if source.text.startswith("%%accelerate"):
            continue
        body = _top(source.text)
        if body is None and has_run:
            # What it has changed is not known.
            found.clear()
        for node in body or ():
            text = ast.get_source_segment(source.text, node) or ""
            found.append(_Statement(source.filename, node, text, has_run))
    return found


def _top(text: str) -> list[ast.stmt] | None:
    """The statements of a cell; None where they cannot be read."""
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _calls(node: ast.AST) -> list[ast.Call]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Call)]


def _names_in(expression: str) -> CellNames:
    # Its lines may need the brackets that stood around it.
    return names_of(f"({expression})")


# ---- the statement that launches -----------------------------------------------------------


@dataclass(frozen=True)
class _Launch:
    """The statement that launches, at the top of a cell; of a click, the newest one before it.

    Attributes:
        file, line: where it begins.
        arguments: the expressions of the function's arguments, by place or name.
        values: what these read, as it was then.
        is_click: whether a click launches.
    """

    file: str
    line: int
    arguments: Mapping[int | str, str]
    values: Mapping[str, Any]
    is_click: bool = False


def _launch_in_cell(namespace: Mapping[str, Any], function: Callable[..., Any]) -> _Launch | None:
    """The statement that launches the function now; None where none does so by itself, and once.

    A click and a thread have none; the arguments of a loop are others each time.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and not _is_of_cell(frame, namespace):
        frame = frame.f_back
    if frame is None:
        return None
    text = "".join(linecache.getlines(frame.f_code.co_filename))
    for node in _top(text) or ():
        if isinstance(node, _SIMPLE) and node.lineno <= frame.f_lineno <= (node.end_lineno or 0):
            calls = [one for one in _calls(node) if _is_call_with(one, function, namespace)]
            if len(calls) == 1 and not _may_repeat(node, calls[0]):
                arguments = {
                    key: ast.get_source_segment(text, part) or ""
                    for key, part in _function_arguments(calls[0])
                }
                values = _values_read(arguments.values(), namespace)
                return _Launch(frame.f_code.co_filename, node.lineno, arguments, values)
    return None


def _launch_by_click(shell: InteractiveShell, text: str) -> _Launch | None:
    """The launch of a click, after all that the cells have done; None where there was no cell."""
    statements, call = _statements(shell), f"_({text})"
    tree = ast.parse(call, mode="eval").body
    if not statements or not isinstance(tree, ast.Call):
        return None
    parts: dict[int | str, ast.expr] = {one.arg: one.value for one in tree.keywords if one.arg}
    if not any(isinstance(part, ast.Starred) for part in tree.args):
        parts |= dict(enumerate(tree.args))
    arguments = {key: ast.get_source_segment(call, part) or "" for key, part in parts.items()}
    values = _values_read(arguments.values(), shell.user_ns)
    last = statements[-1]
    return _Launch(last.file, last.node.lineno, arguments, values, is_click=True)


def _values_read(expressions: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """What the expressions read of the notebook, as it is now."""
    read = {name for part in expressions for name in _names_in(part).used}
    return {name: namespace[name] for name in read if name in namespace}


def _is_of_cell(frame: types.FrameType, namespace: Mapping[str, Any]) -> bool:
    # IPython 8.0 to 8.4 calls the code of a cell ``<cell line: 1>``.
    is_top = frame.f_code.co_name.startswith(("<module>", "<cell line"))
    return is_top and frame.f_globals is namespace


def _is_call_with(
    call: ast.Call, function: Callable[..., Any], namespace: Mapping[str, Any]
) -> bool:
    """Whether the first argument of the call is the function, by its name."""
    given = [*call.args[:1], *(one.value for one in call.keywords if one.arg == "function")]
    return any(isinstance(one, ast.Name) and namespace.get(one.id) is function for one in given)


def _may_repeat(node: ast.stmt, call: ast.Call) -> bool:
    scopes = [part for part in ast.walk(node) if isinstance(part, _SCOPES)]
    return any(call in ast.walk(scope) for scope in scopes)


def _function_arguments(call: ast.Call) -> Iterator[tuple[int | str, ast.expr]]:
    """The expressions of ``args`` and ``kwargs`` of a launch, as far as each stands by itself."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    args = call.args[1] if len(call.args) > 1 else named.get("args")
    parts = args.elts if isinstance(args, (ast.Tuple, ast.List)) else []
    if not any(isinstance(part, ast.Starred) for part in parts):
        yield from enumerate(parts)
    kwargs = named.get("kwargs")
    if isinstance(kwargs, ast.Dict) and None not in kwargs.keys:
        for key, value in zip(kwargs.keys, kwargs.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value
