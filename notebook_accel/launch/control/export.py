"""Write a run's function as a script that torchrun starts.

    imported modules, functions and classes   imported
    functions and classes of cells            copied as source, each after what it needs at once
    numbers, texts, lists of these            written as literals
    everything else                           pickled into the script, together

Classes and functions that are copied as source are pickled by name, so that an instance in the
script has the script's own class. Functions that are pickled (lambdas, closures) have copies of the
globals that they use. What a cell changes on a class or function after its definition
(``Net.forward = faster``) is not written.
"""

from __future__ import annotations

import ast
import base64
import functools
import inspect
import io
import keyword
import linecache
import math
import symtable
import sys
import textwrap
import types
from collections import ChainMap
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.payload.pickling import BY_TYPE, remake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from notebook_accel.launch.payload import CellSource

__all__ = ["Script", "script_of"]

# The attribute by which something that is called says why no script can call it, and what to do.
_NO_SCRIPT = "_notebook_accel_no_script"
# A script is text to read and to commit; data belongs into files.
_MAX_BYTES = 1_000_000
# As symbol tables name them, between angle brackets or not.
_COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp", "genexpr")

_HEAD = '''"""{what}, exported from a notebook.

Run it with: torchrun --nproc_per_node={world_size} {file}
"""
'''
# So that annotations need nothing while a definition's statement runs.
_FUTURE = "from __future__ import annotations\n"
_LOAD = """
# Values that no source text makes, pickled.
def _unpickle(text):
    import base64, io, pickle

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name):
            return globals()[name]

    return Unpickler(io.BytesIO(base64.b85decode(text))).load()

_pickled = _unpickle({text!r})
"""
# What ``functools.lru_cache`` and ``cache`` make of a function.
_Cached: Any = type(functools.lru_cache(len))


def script_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    world_size: int,
    file: str,
    sources: Sequence[CellSource] = (),
) -> str:
    """Return the text of a script that calls ``function(*args, **kwargs)``.

    Args:
        function: as the notebook has it now.
        args, kwargs: what it is called with.
        world_size: the number of processes that the script's first lines propose.
        file: the name that they call the script.
        sources: the notebook's cells, newest first: where the source of classes is looked up.

    Raises:
        NotebookAccelError: the function says that no script can call it; a value can neither be
            written down nor pickled, or is larger than 1 MB.
    """
    refusal = getattr(function, _NO_SCRIPT, None)
    if refusal is not None:
        raise NotebookAccelError(refusal)
    name = getattr(function, "__name__", "function")
    script = Script([source.text for source in sources])
    called = script.value("function", function)
    given = [script.value(f"args[{index}]", arg) for index, arg in enumerate(args)]
    named = {key: script.value(f"kwargs[{key!r}]", value) for key, value in kwargs.items()}
    given += [f"{key}={text}" for key, text in named.items() if _is_name(key)]
    given += [f"**{{{key!r}: {text}}}" for key, text in named.items() if not _is_name(key)]
    body = f'if __name__ == "__main__":\n    {called}({", ".join(given)})\n'
    return script.text(body, what=name, world_size=world_size, file=file)


def _is_name(key: str) -> bool:
    """Return whether ``key=value`` is valid Python; other keys are passed as ``**{key: value}``."""
    return key.isidentifier() and not keyword.iskeyword(key)


class Script:
    """Collects imports, definitions and values that a script needs, and writes them in order.

    Args:
        cells: texts of the notebook's cells, newest first.
    """

    def __init__(self, cells: Sequence[str]) -> None:
        self._cells = cells
        # What each global of the script is.
        self._names: dict[str, Any] = {}
        self._imports: set[str] = set()
        self._literals: dict[str, str] = {}
        # The source of each definition.
        self._definitions: dict[str, str] = {}
        # By name, or by what an error calls it: ``args[0]``.
        self._pickled: dict[str, Any] = {}

    def value(self, label: str, value: Any) -> str:
        """Return an expression for a value, and add what it needs; an error calls it ``label``."""
        if _is_literal(value):
            return _checked_literal(label, value)
        name = getattr(value, "__name__", "") if _is_definition(value) else ""
        has_text = _is_definition(value) and (_is_public(value) or self._has_source(name, value))
        if has_text and self._names.get(name, value) is value:
            self.define(name, value)
            return name
        self._pickle(label, value)
        return f"_pickled[{label!r}]"

    def define(self, name: str, value: Any) -> None:
        """Add a global of that name.

        Raises:
            NotebookAccelError: the script has another value of that name, or this one can neither
                be written down nor pickled.
        """
        if name in self._names:
            if self._names[name] is not value:
                raise NotebookAccelError(
                    f"`{name}` is the name of two things that the script needs; rename one of "
                    "them, launch again, and export that run"
                )
            return
        self._names[name] = value
        if isinstance(value, types.ModuleType):
            self._import(name, value.__name__)
        elif _is_public(value):
            own = value.__qualname__
            alias = own if own == name else f"{own} as {name}"
            self._imports.add(f"from {value.__module__} import {alias}")
        elif self._has_source(name, value):
            self._copy(name, value)
        elif _is_literal(value):
            self._literals[name] = _checked_literal(name, value)
        else:
            self._pickle(name, value)

    def text(self, body: str, *, what: str, world_size: int, file: str) -> str:
        """Return the script; ``body`` is its end.

        Raises:
            NotebookAccelError: definitions and pickled values need each other.
        """
        needs = {name: self._needed_at_once(name) for name in self._definitions}
        late = [name for name in self._ordered(needs) if needs[name] & self._pickled.keys()]
        early = [name for name in self._ordered(needs) if name not in late]
        parts = [
            _HEAD.format(what=what, world_size=world_size, file=file),
            _FUTURE,
            "\n".join(sorted(self._imports)),
            "\n".join(f"{name} = {text}" for name, text in self._literals.items()),
            *(f"\n{self._definitions[name].strip()}" for name in early),
            self._load(late),
            *(f"\n{self._definitions[name].strip()}" for name in late),
            f"\n{body}",
        ]
        return "\n".join(part for part in parts if part.strip())

    def _import(self, name: str, module: str) -> None:
        if module != name:
            self._imports.add(f"import {module} as {name}")
            return
        # ``import package.part`` in a cell assigns the package alone.
        parts = {
            alias.name
            for text in self._cells
            for node in ast.walk(_parsed(text))
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.asname is None and alias.name.startswith(f"{name}.")
        }
        self._imports |= {f"import {part}" for part in parts & sys.modules.keys() or {name}}

    def _has_source(self, name: str, value: Any) -> bool:
        is_named = _is_definition(value) and getattr(value, "__name__", "") == name
        return is_named and _source_of(value, self._cells) is not None

    def _copy(self, name: str, value: Any) -> None:
        source = self._definitions[name] = _source_of(value, self._cells) or ""
        known = _globals_of(value)
        for read in sorted(set(_globals_read(symtable.symtable(source, "", "exec")))):
            if read in known:
                self.define(read, known[read])

    def _pickle(self, label: str, value: Any) -> None:
        """Add a value to the script's pickle, and the definitions that it needs to the script."""
        self._pickled[label] = value
        try:
            _ScriptPickler(_SmallFile(), self._reference).dump(value)
        except NotebookAccelError:
            raise
        except _TooLargeError:
            raise _too_large(label, value) from None
        except Exception as error:  # whatever a user's object does when it is pickled
            raise NotebookAccelError(
                f"`{label}` ({type(value).__name__}) cannot be written into a script: {error}. "
                "Make it inside the function, launch again, and export that run"
            ) from error

    def _reference(self, value: Any) -> str | None:
        """Return the script's name of a definition that is copied as source; else None."""
        if not _is_definition(value) or getattr(value, "__module__", "") != "__main__":
            return None
        name = value.__name__
        is_there = _globals_of(value).get(name) is value and self._has_source(name, value)
        is_taken = self._names.get(name, value) is not value
        if not is_there or (is_taken and isinstance(value, types.FunctionType)):
            return None
        self.define(name, value)
        return str(name)

    def _load(self, late: Sequence[str]) -> str:
        """Return the lines of the script that unpickle its values and assign them to names."""
        if not self._pickled:
            return ""

        def reference(value: Any) -> str | None:
            name = self._reference(value)
            if name not in late:
                return name
            if isinstance(value, type):
                raise NotebookAccelError(
                    f"`{name}` needs a value while it is defined that itself needs `{name}`: make "
                    "that value inside the function, launch again, and export that run"
                )
            # A function may be there twice: what was registered with a decorator, say.
            return None

        file = io.BytesIO()
        # In one pickle: an object that two values share stays one.
        _ScriptPickler(file, reference).dump(self._pickled)
        names = [f"{name} = _pickled[{name!r}]" for name in self._pickled if name in self._names]
        text = base64.b85encode(file.getvalue()).decode()
        return "\n".join([_LOAD.format(text=text), *names])

    def _needed_at_once(self, name: str) -> set[str]:
        """Return the globals that a definition may look up while its statement runs.

        Those are its decorators, bases and defaults, what the body of a class reads, and what
        these read in turn, since they may be called.
        """
        found: set[str] = set()
        waiting = [*self._read_by(name, at_once=True)]
        while waiting:
            used = waiting.pop()
            if used not in found:
                found.add(used)
                waiting += self._read_by(used) if used in self._definitions else ()
        return found

    def _read_by(self, name: str, *, at_once: bool = False) -> Iterator[str]:
        table = symtable.symtable(_FUTURE + self._definitions[name], "", "exec")
        return _globals_read(table, at_once=at_once)

    def _ordered(self, needs: Mapping[str, set[str]]) -> list[str]:
        """Return the definitions in the order of their cells, each after those that it needs."""
        ordered: dict[str, None] = {}
        begun: set[str] = set()

        def add(name: str) -> None:
            if name not in begun and name in needs:
                begun.add(name)
                for used in sorted(needs[name]):
                    add(used)
                ordered[name] = None

        for name in sorted(self._definitions, key=self._place):
            add(name)
        return [*ordered]

    def _place(self, name: str) -> tuple[int, int]:
        """Return the number of a definition's cell, from the oldest on, and the place in it."""
        source = self._definitions[name].strip()
        for index, cell in enumerate(self._cells):
            if source in cell:
                return len(self._cells) - index, cell.find(source)
        return 0, list(self._definitions).index(name)


# ---- the source of what cells define, and which globals it looks up ------------------------


def _source_of(value: Any, cells: Sequence[str]) -> str | None:
    """Return the source of a function or class; None for a closure, a lambda or unknown source."""
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
        and _globals_of(value).get(value.__name__) is value
        and not hasattr(value, "dispatch")
    )
    return source if is_made_by_it else None


def _parsed(text: str) -> ast.Module:
    """Parse a cell; one that is not valid Python, such as one with a magic, is empty."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _class_in_cells(value: type, cells: Sequence[str]) -> str | None:
    """Return a class's statement from the cells, newest first; None where no cell defines it."""
    files = (function.__code__.co_filename for function in _functions(value))
    for text in [*("".join(linecache.getlines(file)) for file in files), *cells]:
        for node in reversed(_parsed(text).body):
            if isinstance(node, ast.ClassDef) and node.name == value.__qualname__:
                first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return None


def _globals_read(table: symtable.SymbolTable, *, at_once: bool = False) -> Iterator[str]:
    """Yield the global names that a definition reads; a name may come twice.

    Nested functions, classes and comprehensions count, and so do decorators, bases, defaults and
    annotations.

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
            yield from _globals_read(child, at_once=at_once)


def _globals_of(value: Any) -> Mapping[str, Any]:
    """Return the global namespace in which a function or class was defined."""
    functions = _functions(value)
    if functions:
        return functions[0].__globals__
    return vars(sys.modules[value.__module__])


def _functions(value: Any) -> list[types.FunctionType]:
    """Return a function's unwrapped self as a list; for a class, the functions that it defines."""
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


class _TooLargeError(Exception):
    """A pickle has grown larger than a script should be."""


class _SmallFile(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MAX_BYTES:
            raise _TooLargeError
        return super().write(data)


class _ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles definitions that the script has by their names, everything else by value."""

    dispatch_table: ClassVar[Any] = ChainMap(BY_TYPE, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, reference: Callable[[Any], str | None]) -> None:
        super().__init__(file)
        self._reference = reference

    def persistent_id(self, value: Any) -> str | None:
        return self._reference(value)

    def reducer_override(self, value: Any) -> Any:
        return remake(value) or super().reducer_override(value)


def _too_large(label: str, value: Any) -> NotebookAccelError:
    return NotebookAccelError(
        f"`{label}` ({type(value).__name__}) is larger than the {_MAX_BYTES // 1_000_000} MB that "
        "a script should hold: load it inside the function, from a file, launch again, and "
        "export that run"
    )


def _checked_literal(label: str, value: Any) -> str:
    text = repr(value)
    if len(text) > _MAX_BYTES:
        raise _too_large(label, value)
    return text


def _is_definition(value: Any) -> bool:
    """Whether a statement that begins with ``def`` or ``class`` may have made the value."""
    return isinstance(value, (type, types.FunctionType, _Cached))


def _is_public(value: Any) -> bool:
    """Whether the value is a class or function that its module has under its own name."""
    try:
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        name = str(getattr(value, "__qualname__", ""))
    except Exception:  # whatever a user's class does
        return False
    if module is None or module.__name__ == "__main__" or not name.isidentifier():
        return False
    return getattr(module, name, None) is value


def _is_literal(value: Any) -> bool:
    """Whether ``repr`` is an expression of an equal value of the same types."""
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    if type(value) in (dict, list, tuple, set):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return all(map(_is_literal, parts))
    return value is None or type(value) in (bool, int, str, bytes)
