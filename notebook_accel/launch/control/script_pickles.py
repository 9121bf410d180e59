"""Values of an exported script that no source text makes: pickled, and tied to its definitions.

A pickle of cloudpickle's own holds copies of the notebook's classes and functions, which would
stand beside those that the script copies as source: ``mode is Mode.TRAIN`` would be false there
without a word. So a pickle refers to the script's definitions by their names. All pickles share one
memo, so that an object that two values share stays one.
"""

from __future__ import annotations

import base64
import functools
import io
import types
from collections import ChainMap
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle

from notebook_accel.launch.payload.cells import class_body_names
from notebook_accel.launch.payload.remade import BY_TYPE, remake

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["LOAD", "ScriptPickler", "is_definition"]

LOAD = '''
# These values are pickled: no text of the notebook makes them, or they were changed after it ran.
def _unpickler():
    import base64, io, pickle

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name):
            return eval(name, globals())

    file = io.BytesIO()
    unpickler = Unpickler(file)

    def unpickled(text):
        """The next value, which may share parts with those before it."""
        file.seek(0)
        file.truncate()
        file.write(base64.b85decode(text))
        file.seek(0)
        return unpickler.load()

    return unpickled

_unpickled = _unpickler()
'''

# What ``functools.lru_cache`` and ``cache`` make of a function.
_Cached: Any = type(functools.lru_cache(len))


def is_definition(value: Any) -> bool:
    """Whether a statement that begins with ``def`` or ``class`` may have made the value."""
    return isinstance(value, (type, types.FunctionType, _Cached))


class _ScriptGlobals:
    """Stands for the globals of the script."""


class ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles one value after the other, in the order in which the script reads them.

    Args:
        globals_of: the globals that a class or function was defined among.
        reserve: keeps names of the script for values; False where it cannot.
        is_there: whether the script has a global of that name by now.

    Attributes:
        needed: the script's globals that must be there when the value is read.
        read: those, and what functions of the value look up later.
    """

    dispatch_table: ClassVar[Any] = ChainMap(BY_TYPE, cloudpickle.Pickler.dispatch_table)

    def __init__(
        self,
        *,
        globals_of: Callable[[Any], Mapping[str, Any]],
        reserve: Callable[[Mapping[str, Any]], bool],
        is_there: Callable[[str], bool],
    ) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file)
        self._globals_of = globals_of
        self._reserve = reserve
        self._is_there = is_there
        self._root: Any = None
        self.needed: dict[str, Any] = {}
        self.read: dict[str, Any] = {}

    def text_of(self, value: Any) -> str:
        """The next value as the expression that reads it in the script."""
        self._root = value
        self._file.seek(0)
        self._file.truncate()
        self.dump(value)
        return f"_unpickled({base64.b85encode(self._file.getvalue()).decode()!r})"

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, _ScriptGlobals):
            return "globals()"
        if (
            value is self._root
            or not is_definition(value)
            or getattr(value, "__module__", "") != "__main__"
        ):
            return None
        known, path = self._globals_of(value), str(value.__qualname__)
        name = path.partition(".")[0]
        if not path.replace(".", "").isidentifier() or name not in known:
            return None
        try:
            has_path = attrgetter(path)(types.SimpleNamespace(**{name: known[name]})) is value
        except AttributeError:
            return None
        # What is a part of the value itself cannot be there before it.
        if not has_path or known[name] is self._root or not self._is_there(name):
            return None
        if not self._reserve({name: known[name]}):
            return None
        self.needed[name] = self.read[name] = known[name]
        return path

    def reducer_override(self, value: Any) -> Any:
        reduced = remake(value) or super().reducer_override(value)
        if isinstance(value, types.FunctionType) and isinstance(reduced, tuple):
            return self._with_globals_of_the_script(value, reduced)
        return reduced

    def _with_globals_of_the_script(self, function: types.FunctionType, reduced: Any) -> Any:
        """Let a function look up the script's own globals, where they are those that it knew."""
        build, arguments, state, *rest = reduced
        if function.__module__ != "__main__" or len(rest) != 3:
            return reduced
        known, used = function.__globals__, state[1]["__globals__"]
        for name in class_body_names(function.__code__):
            if name in known:
                used.setdefault(name, known[name])
        if not self._reserve(used):
            return reduced
        self.read.update(used)
        used.clear()
        code, _, *others = arguments
        return build, (code, _ScriptGlobals(), *others), state, *rest
