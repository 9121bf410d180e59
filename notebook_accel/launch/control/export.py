"""A run's function as a script that torchrun starts.

What was written in cells is copied as source, what was imported is imported, plain values are
written down, others made as the notebook made them; only what has no readable form is carried along
pickled.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import keyword
import re
import symtable
import sys
import types
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.control.script_pickles import LOAD, ScriptPickler, is_definition
from notebook_accel.launch.control.script_sources import (
    globals_of,
    globals_read,
    parsed,
    source_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from notebook_accel.launch.payload import CellSource

__all__ = ["Origin", "Origins", "is_public_name", "script_of"]

# The attribute by which something that is called says why no script can call it, and what to do.
_NO_SCRIPT = "_notebook_accel_no_script"

_HEAD = '''"""{name}, exported from a notebook.

Run it with: torchrun --nproc_per_node={world_size} {file}
"""
'''
_FUTURE = "from __future__ import annotations\n"


@dataclass(frozen=True)
class Origin:
    """A text of the notebook that makes a value once more.

    Attributes:
        text: a statement, or the expression of an argument.
        names: what it reads, with the values that the notebook has.
        order: its place among the notebook's statements.
    """

    text: str
    names: Mapping[str, Any]
    order: int


class Origins:
    """Where the values of a launch came from.

    This class knows of none, as outside of a notebook; the notebook's is in notebook/origins.py.
    """

    def of_argument(self, key: int | str) -> Origin | None:
        """The expression of an argument, by its place or name."""
        return None

    def of_global(self, name: str, value: Any) -> Origin | None:
        """The statement that made the value which the notebook has under that name, as it is."""
        return None

    def changed_parts(self, name: str) -> set[str]:
        """The attributes of a class or function of that name that statements may have changed."""
        return set()

    def of_seed(self) -> Origin | None:
        """The statement before the launch that set the seed of random numbers."""
        return None


def script_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    world_size: int,
    file: str,
    sources: Sequence[CellSource] = (),
    origins: Origins | None = None,
) -> str:
    """The text of a script that calls ``function(*args, **kwargs)``.

    Args:
        function: as the notebook has it now.
        args, kwargs: what it is called with.
        world_size: the number of processes that the script's first lines propose.
        file: the name that they call the script.
        sources: the notebook's cells, newest first: where classes without methods are found.
        origins: where the values came from.

    Raises:
        NotebookAccelError: the function says that no script can call it, or a value that is used
            can neither be written down nor pickled.
    """
    refusal = getattr(function, _NO_SCRIPT, None)
    if refusal is not None:
        raise NotebookAccelError(refusal)
    name = getattr(function, "__name__", "function")
    head = _HEAD.format(name=name, world_size=world_size, file=file)
    cells = [source.text for source in sources]
    future = _FUTURE if _keeps_annotations(function, cells) else ""
    script = _Script(cells=cells, origins=origins or Origins(), future=future)
    text = script.text(head, script.call(function, args, kwargs))
    if script.has_circle and not future:
        # Cells that ran more than once may name each other in their annotations.
        script = _Script(cells=cells, origins=origins or Origins(), future=_FUTURE)
        text = script.text(head, script.call(function, args, kwargs))
    return text


def _is_name(key: str) -> bool:
    """Whether a keyword argument can be written as one; others can be in a dict alone."""
    return key.isidentifier() and not keyword.iskeyword(key)


# The places of definitions, and of the call that sets the seed.
_FIRST = -2
_SEED = -1


@dataclass(frozen=True)
class _Definition:
    """A function or class that is copied, or the statement of another value.

    Attributes:
        source: its statement; empty where the value is pickled.
        read: the globals that it looks up, at any time.
        needed: those of them that it looks up while the statement runs: decorators, bases,
            defaults, and what the body of a class does.
        order: its place after the functions and classes; theirs is `_FIRST`.
        owner: where it gives an attribute to a function or class, the name of that.
    """

    source: str
    read: frozenset[str]
    needed: frozenset[str]
    order: int
    owner: str = ""


@dataclass
class _Script:
    """Parts of the script, in the order in which they are written.

    Attributes:
        cells: the notebook's, newest first.
        origins: where the values came from.
        future: the import by which annotations are kept as text, where the notebook has it.
        has_circle: whether definitions need each other while their statements run.
    """

    cells: Sequence[str]
    origins: Origins
    future: str
    imports: dict[str, None] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    definitions: dict[str, _Definition] = field(default_factory=dict)
    # What each global of the script is: reserved before it is defined.
    names: dict[str, Any] = field(default_factory=dict)
    defined: set[str] = field(default_factory=set)
    pickled: dict[str, Any] = field(default_factory=dict)
    makes_values: bool = False
    has_circle: bool = False

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        """The call of the function, which the script makes at its end."""
        called = self.value(getattr(function, "__name__", "function"), function)
        given = [
            self.value(f"args[{index}]", arg, self.origins.of_argument(index))
            for index, arg in enumerate(args)
        ]
        named = {
            key: self.value(key, value, self.origins.of_argument(key))
            for key, value in kwargs.items()
        }
        given += [f"{key}={text}" for key, text in named.items() if _is_name(key)]
        given += [f"**{{{key!r}: {text}}}" for key, text in named.items() if not _is_name(key)]
        self._add_seed()
        return f"{called}({', '.join(given)})"

    def reserve(self, names: Mapping[str, Any]) -> bool:
        """Keep these names for these values; False where another value has one of them."""
        if any(self.names.get(name, value) is not value for name, value in names.items()):
            return False
        self.names.update(names)
        return True

    def define(self, name: str, value: Any) -> None:
        """Give the script a global of that name, which was reserved for the value."""
        if name in self.defined:
            return
        self.defined.add(name)
        if isinstance(value, types.ModuleType):
            module = value.__name__
            lines = [f"import {module} as {name}"]
            if module == name:
                lines = [f"import {part}" for part in self._submodules_of(name) or [name]]
            self.imports |= dict.fromkeys(lines)
        elif is_public_name(value):
            own = value.__qualname__
            alias = own if own == name else f"{own} as {name}"
            self.imports[f"from {_public_module(value)} import {alias}"] = None
        elif (
            is_definition(value)
            and getattr(value, "__name__", None) == name
            and (source := source_of(value, self.cells))
            and self._copy_source(value, source)
        ):
            return
        elif _is_plain(value):
            self.values.append(f"{name} = {value!r}")
        elif (origin := self.origins.of_global(name, value)) and self.reserve(origin.names):
            self._copy_statement(name, origin, origin.order)
        else:
            self._pickle(name, value, label=name)

    def value(self, label: str, value: Any, origin: Origin | None = None) -> str:
        """An expression for a value, which an error calls by the label."""
        if _is_plain(value):
            return repr(value)
        name = getattr(value, "__name__", "") if is_definition(value) else ""
        has_name = name.isidentifier()
        has_text = has_name and (is_public_name(value) or source_of(value, self.cells) is not None)
        # Several functions of one name may be made by one text: ``make_loss(1.0), make_loss(2.0)``.
        if not has_text and origin is not None and self.reserve(origin.names):
            self.makes_values = True
            self._define_all(origin.names)
            return origin.text
        if has_name and self.reserve({name: value}):
            self.define(name, value)
            return name
        name = "given_" + re.sub(r"\W+", "_", label).strip("_")
        while not self.reserve({name: value}):
            name += "_"
        self._pickle(name, value, label)
        return name

    def _add_seed(self) -> None:
        """Set the seed as the notebook did, where the script makes values: they may be random."""
        origin = self.origins.of_seed() if self.makes_values else None
        if origin is not None and self.reserve(origin.names):
            self._copy_statement(origin.text, origin, _SEED)

    def _submodules_of(self, package: str) -> list[str]:
        """What cells import by ``import package.part``, which assigns the package alone."""
        imported = {
            part.name
            for text in self.cells
            for node in ast.walk(parsed(text))
            if isinstance(node, ast.Import)
            for part in node.names
            if part.asname is None and part.name.startswith(f"{package}.")
        }
        return sorted(imported & sys.modules.keys())

    def _define_all(self, names: Mapping[str, Any]) -> None:
        for name, value in names.items():
            self.define(name, value)

    def _copy_statement(self, name: str, origin: Origin, order: int) -> None:
        self.makes_values = True
        read = frozenset(origin.names)
        self.definitions[name] = _Definition(origin.text, read, needed=read, order=order)
        self._define_all(origin.names)

    def _pickle(self, name: str, value: Any, label: str) -> None:
        """Give the script a global that is pickled, and what the pickle needs of the script."""
        # This pickle only shows what the value needs. `_sources` writes the final one, once the
        # order of all definitions is known.
        pickler = self._pickler(is_there=lambda _: True)
        try:
            pickler.text_of(value)
        except Exception as error:  # whatever a user's object does when it is pickled
            raise NotebookAccelError(
                f"`{label}` ({type(value).__name__}) cannot be written into a script: {error}. "
                "Make it inside the function, launch again, and export that run"
            ) from error
        self.pickled[name] = value
        needed, read = frozenset(pickler.needed), frozenset(pickler.read)
        self.definitions[name] = _Definition("", read, needed, order=_FIRST)
        self._define_all(pickler.read)

    def _pickler(self, is_there: Callable[[str], bool]) -> ScriptPickler:
        return ScriptPickler(globals_of=globals_of, reserve=self.reserve, is_there=is_there)

    def _copy_source(self, value: Any, source: str) -> bool:
        """Copy a definition; False where it reads a global that is another one in the script."""
        read = frozenset(globals_read(symtable.symtable(source, "", "exec")))
        # With `from __future__ import annotations` no name in an annotation is looked up.
        table = symtable.symtable(self.future + source, "", "exec")
        needed = frozenset(globals_read(table, at_once=True))
        known = globals_of(value)
        used = {name: known[name] for name in sorted(read & known.keys())}
        if not self.reserve(used):
            return False
        self.definitions[value.__name__] = _Definition(source, read, needed, order=_FIRST)
        self._define_all(used)
        self._change_parts(value, source)
        return True

    def _change_parts(self, value: Any, source: str) -> None:
        """Give a definition the attributes that it was given after its statement."""
        own = vars(value)
        names = self.origins.changed_parts(value.__name__) & own.keys()
        # Without a decorator a function begins with no attributes, so that each came later.
        if not isinstance(value, type) and not source.startswith("@"):
            names |= own.keys()
        for name in sorted(names):
            part, path = own[name], f"{value.__name__}.{name}"
            if getattr(part, "__qualname__", None) == path or not name.isidentifier():
                continue
            text = self.value(path, part)
            read = frozenset(globals_read(symtable.symtable(text, "", "eval")))
            needed = read | {value.__name__}
            statement = f"{path} = {text}"
            self.definitions[path] = _Definition(
                statement, needed, needed, order=_FIRST, owner=value.__name__
            )

    def _sources(self) -> list[str]:
        """The definitions, each after those that must be there when its statement runs.

        A statement may call a name that it needs (a decorator, a default). So what that name reads
        comes before the statement too, unless it needs this definition itself.
        """
        begun: set[str] = set()
        written: dict[str, str] = {}
        # Two definitions may need each other, as a function and what was registered with it do.
        # What comes second is not defined yet where the first is made, so a pickle holds a copy.
        pickler = self._pickler(lambda name: name in written or name not in self.definitions)

        def write(name: str) -> None:
            if name in begun or name not in self.definitions:
                return
            begun.add(name)
            definition = self.definitions[name]
            for used in sorted(definition.needed):
                write(used)
            # An attribute that is given to a class calls nothing of the class.
            called = definition.needed - {definition.owner}
            write_ready(self._reached(called, attrgetter("read")))
            self.has_circle |= bool(definition.needed & self.definitions.keys() - written.keys())
            written[name] = definition.source
            if name in self.pickled:
                written[name] = f"{name} = {pickler.text_of(self.pickled[name])}"
            write_ready(path for path, one in self.definitions.items() if one.owner == name)

        def write_ready(names: Iterable[str]) -> None:
            for used in sorted(names):
                if not self._reached({used}, attrgetter("needed")) & (begun - written.keys()):
                    write(used)

        # What was found last is used by what was found before it; the sort keeps that order.
        found = reversed(self.definitions)
        for name in sorted(found, key=lambda name: self.definitions[name].order):
            write(name)
        # A statement that assigns several names stands under each of them, and is written once.
        return list(dict.fromkeys(written.values()))

    def _reached(
        self, names: Iterable[str], of: Callable[[_Definition], frozenset[str]]
    ) -> set[str]:
        """The definitions of these names, those that they use, and so on."""
        found: set[str] = set()
        left = [*names]
        while left:
            name = left.pop()
            if name in self.definitions and name not in found:
                found.add(name)
                left += of(self.definitions[name])
        return found

    def text(self, head: str, call: str) -> str:
        load = LOAD if self.pickled else ""
        parts = [
            head,
            self.future,
            "\n".join(sorted(self.imports)),
            load,
            "\n".join(self.values),
            *(f"\n{source.strip()}" for source in self._sources()),
            f'\nif __name__ == "__main__":\n    {call}\n',
        ]
        return "\n".join(part for part in parts if part.strip())


def _keeps_annotations(function: Callable[..., Any], cells: Iterable[str]) -> bool:
    """Whether the notebook keeps annotations as text, by an import from ``__future__``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    is_public = is_public_name(function)
    if code is not None and not is_public and code.co_flags & __future__.annotations.compiler_flag:
        return True
    imports = [node for text in cells for node in parsed(text).body]
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(part.name == "annotations" for part in node.names)
        for node in imports
    )


def is_public_name(value: Any) -> bool:
    """Whether the value is a class or function that its module has under its own name."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or not name.isidentifier():
        return False
    return getattr(module, name, None) is value


def _is_plain(value: Any) -> bool:
    try:
        made = ast.literal_eval(repr(value))
        return bool(made == value) and _has_types_of(made, value)
    except Exception:  # whatever a user's class does
        return False


def _has_types_of(made: Any, value: Any) -> bool:
    """Whether plain data has the very types of the equal ``value``: a class derived from dict may
    have dict's own text."""
    if type(made) is not type(value):
        return False
    if isinstance(made, dict):
        return _has_types_of([*made, *made.values()], [*value, *value.values()])
    if isinstance(made, (list, tuple)):
        return all(map(_has_types_of, made, value))
    return not isinstance(made, set) or set(map(type, made)) == set(map(type, value))


def _public_module(value: Any) -> str:
    """The outermost package that has the value by its name: ``torch.nn`` for ``Linear``."""
    parts = value.__module__.split(".")
    outer = (".".join(parts[:count]) for count in range(1, len(parts)))
    name = value.__qualname__
    for module_name in outer:
        module = sys.modules.get(module_name)
        # By dir() first: asking some packages for a name imports a module of theirs.
        if name in dir(module) and getattr(module, name, None) is value:
            return module_name
    return str(value.__module__)
