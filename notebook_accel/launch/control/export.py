"""Write a run's function as a script that torchrun starts.

How each value that the function uses gets into the script:

    imported modules, functions and classes   imported
    functions and classes of cells            copied as source; each one after the globals that its
                                              ``def`` or ``class`` statement reads
    numbers, strings, containers of these     written as literals
    everything else                           pickled; all in one pickle, as text in the script

The pickle refers to classes and functions that are copied as source by name, so that an unpickled
instance has the script's own class. Functions that are pickled themselves (lambdas, closures) carry
copies of the globals that they use. What a cell changes on a class or function after its definition
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
        function: the notebook's function.
        args, kwargs: its arguments.
        world_size: number of processes in the torchrun command of the script's head comment.
        file: name of the script in that command.
        sources: the notebook's cells, newest first, in which the source of classes and imports of
            submodules are looked up.

    Raises:
        NotebookAccelError: the function is marked as one that no script can call (attribute
            ``_notebook_accel_no_script``); a value can neither be written as source nor pickled,
            or is larger than 1 MB; or two different values need the same name.
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
    """Collects the imports, definitions and values of a script, and makes its text of them.

    :meth:`value` and :meth:`define` collect, then :meth:`text` makes the text.

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
        """Return a Python expression for a value, and add what the expression needs to the script.

        Args:
            label: what an error message calls the value: ``args[0]``.
            value: any object of the notebook.

        Raises:
            NotebookAccelError: as :meth:`define`.
        """
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
        """Add a global variable ``name`` to the script, and all that its value needs in turn.

        Raises:
            NotebookAccelError: the script already has a different global of this name; or the value
                can neither be written as source nor pickled.
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
        """Return the text of the script.

        Args:
            body: the last lines, which call the function.
            what: name of the function, for the script's docstring.
            world_size, file: as in :func:`script_of`.

        Raises:
            NotebookAccelError: a class needs a pickled value while it is defined, and that value
                needs the class.
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
        """Add a value to the script's pickle, and the definitions that it needs to the script.

        The value is pickled once on trial, to find these definitions and to fail early.

        Args:
            label: key of the value in the pickle, and its name in an error message.
            value: what is pickled.

        Raises:
            NotebookAccelError: the value cannot be pickled, or is too large for a script.
        """
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
        """Return the global name by which the pickle refers to a value; None to pickle it by value.

        Only functions and classes of cells whose source can be copied have such a name. Their
        definition is added to the script.
        """
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
        """Return the script's lines that unpickle values and assign them to names; "" if none.

        Args:
            late: definitions that come after these lines, since they need pickled values. The
                pickle cannot refer to them.

        Raises:
            NotebookAccelError: the pickle needs a class of ``late``.
        """
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
        """Return the globals that a definition may read while its ``def`` or ``class`` runs.

        These are the globals in decorators, base classes, default values and class bodies. If one
        of them is itself copied as source, all globals that it reads are added, since it may be
        called.

        Args:
            name: name of a function or class that is copied as source.
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
        """Return the definitions' names in cell order, but each after those that it needs.

        Args:
            needs: for each definition, the globals that must exist before its statement runs.
        """
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
        """Return a sort key for a definition: (number of its cell, position in the cell's text).

        The oldest cell has number 1. A definition that is found in no cell has the key (0, its
        index among all definitions).
        """
        source = self._definitions[name].strip()
        for index, cell in enumerate(self._cells):
            if source in cell:
                return len(self._cells) - index, cell.find(source)
        return 0, list(self._definitions).index(name)


# ---- the source of what cells define, and which globals it looks up ------------------------


def _source_of(value: Any, cells: Sequence[str]) -> str | None:
    """Return source text that makes this function or class again; None if there is none.

    There is none for closures and lambdas, if the source is unknown, or if the source alone would
    not give an equal function (``functools.singledispatch``).

    Args:
        value: a function or class.
        cells: texts of the notebook's cells, newest first.
    """
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
    """Parse a cell; return an empty module if it is not valid Python (has a magic, say)."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _class_in_cells(value: type, cells: Sequence[str]) -> str | None:
    """Return the text of a class's ``class`` statement with its decorators; None if not found.

    Args:
        value: the class.
        cells: texts of the notebook's cells, newest first. The cells that its methods come from
            are searched first.
    """
    files = (function.__code__.co_filename for function in _functions(value))
    for text in [*("".join(linecache.getlines(file)) for file in files), *cells]:
        for node in reversed(_parsed(text).body):
            if isinstance(node, ast.ClassDef) and node.name == value.__qualname__:
                first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return None


def _globals_read(table: symtable.SymbolTable, *, at_once: bool = False) -> Iterator[str]:
    """Yield the global names that a definition reads; a name may come more than once.

    Includes names that are read in nested functions, classes and comprehensions, and in decorators,
    base classes, default values and annotations.

    Args:
        table: symbol table of the definition's source.
        at_once: yield only names that are read while the ``def`` or ``class`` statement itself
            runs. The body of a class and comprehensions run then; the body of a function runs later
            and is left out.
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
    """Return the Python functions behind a function or class, without decorators' wrappers.

    For a function this is the unwrapped function alone; for a class, the methods that the class
    body defines.
    """
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
    """Raised while pickling once the pickle is larger than a script may hold (1 MB)."""


class _SmallFile(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MAX_BYTES:
            raise _TooLargeError
        return super().write(data)


class _ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler for the values of an exported script.

    Functions and classes that the script defines are pickled as names, everything else by value.

    Args:
        file: where the pickle is written.
        reference: returns the name of a function or class that the script defines, and None for
            every other value.
    """

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
    """Return whether the value is a class or a Python function.

    True also for a lambda, and for a function that ``functools.lru_cache`` wraps.
    """
    return isinstance(value, (type, types.FunctionType, _Cached))


def _is_public(value: Any) -> bool:
    """Return whether a script can import the value by its own name from its module.

    False for everything defined in ``__main__``, and so in the notebook's cells.
    """
    try:
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        name = str(getattr(value, "__qualname__", ""))
    except Exception:  # whatever a user's class does
        return False
    if module is None or module.__name__ == "__main__" or not name.isidentifier():
        return False
    return getattr(module, name, None) is value


def _is_literal(value: Any) -> bool:
    """Return whether ``repr(value)`` is an expression that gives an equal value of the same type.

    True for a list, tuple, set or dict if it is True for all of its items.
    """
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    if type(value) in (dict, list, tuple, set):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return all(map(_is_literal, parts))
    return value is None or type(value) in (bool, int, str, bytes)
