"""How to send what Python pickles only by its name in a module, or not at all.

The name is of no use where ``__main__`` is another; so these are made anew from their parts.
"""

from __future__ import annotations

import functools
import sys
import types
import typing
import weakref
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BY_TYPE", "NAMED_TYPES", "remake"]


def rebuild_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """A function under ``functools.lru_cache``, its cache empty."""
    return functools.lru_cache(**parameters)(function)


def rebuild_compiled(compile_in: Callable[[Any], Any], function: Any) -> Any:
    """A function under ``torch.compile``; ``compile_in`` holds its backend and options."""
    return compile_in(function)


def _reduce_cached(value: Any) -> tuple[Any, ...]:
    return rebuild_cached, (value.__wrapped__, value.cache_parameters()), vars(value)


def _reduce_new_type(value: Any) -> tuple[Any, ...]:
    return type(value), (value.__name__, value.__supertype__), {"__module__": value.__module__}


def _reduce_by_name(value: Any) -> tuple[Any, ...]:
    return type(value), (value.__name__,)


# Objects that have a name of their own, as classes and functions have.
_NAMED: dict[Any, Callable[[Any], tuple[Any, ...]]] = {
    type(functools.lru_cache(len)): _reduce_cached,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_by_name,
}
if sys.version_info >= (3, 11):
    _NAMED[typing.TypeVarTuple] = _reduce_by_name

NAMED_TYPES = (*_NAMED, type, types.FunctionType, typing.TypeVar)


def _reduce_cached_property(value: Any) -> tuple[Any, ...]:
    # Up to Python 3.11 a cached_property holds a lock, which cannot be pickled.
    return functools.cached_property, (value.func,), {"attrname": value.attrname}


def _reduce_weak(value: Any) -> tuple[Any, ...]:
    return type(value), (dict(value.items()),)


# How values are pickled, by their type; picklers add this to their ``dispatch_table``.
BY_TYPE: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    functools.cached_property: _reduce_cached_property,
    weakref.WeakKeyDictionary: _reduce_weak,
    weakref.WeakValueDictionary: _reduce_weak,
}


def remake(value: Any) -> tuple[Any, ...] | None:
    """What pickle is to know of a named object that other processes cannot import.

    None where cloudpickle knows by itself what to do.
    """
    reduce = _NAMED.get(type(value))
    if reduce is not None:
        return None if _is_at_its_name(value) else reduce(value)
    if isinstance(value, types.FunctionType) and "_torchdynamo_orig_callable" in vars(value):
        return _reduce_compiled(value)
    return None


def _is_at_its_name(value: Any) -> bool:
    """Whether the value's module, imported elsewhere, has it under its qualified name."""
    module = sys.modules.get(value.__module__)
    name = getattr(value, "__qualname__", None) or value.__name__
    if module is None or module.__name__ == "__main__":
        return False
    try:
        return attrgetter(name)(module) is value
    except AttributeError:
        return False


def _reduce_compiled(function: types.FunctionType) -> tuple[Any, ...] | None:
    """torch pickles the context in which a function is compiled, but not the function."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "self" not in cells:
        return None
    original = vars(function)["_torchdynamo_orig_callable"]
    return rebuild_compiled, (cells["self"].cell_contents, original)
