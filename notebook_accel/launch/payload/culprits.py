"""Finds the value at fault when pickling fails, and writes the error in the user's own names."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from notebook_accel.errors import LaunchError
from notebook_accel.launch.payload import pickling
from notebook_accel.launch.payload.pickling import CallPickler, Refused, ResultPickler
from notebook_accel.private import of_torch

T = TypeVar("T")

# Values that are looked into, and parts of each of them that are pickled to see which cannot be.
_MAX_LOOKS = 100
_MAX_PARTS = 10_000
# What a bound method, a static or class method, or a partial has inside.
_HOLDERS = (types.MethodType, staticmethod, classmethod, functools.partial)
_HELD = ("__self__", "__func__", "func", "args", "keywords")


class Culprit(NamedTuple):
    """The innermost value that cannot be pickled, found after a call or a result failed to pickle.

    Attributes:
        user: name of the function or class that uses the value; "" if none does.
    """

    path: str
    value: Any
    user: str
    error: BaseException

    def sentence(self, verb: str, advice: str) -> str:
        """Return the error message: the value and its type, ``verb``, and what to do."""
        if isinstance(self.error, Refused):
            what = str(self.error)
        else:
            what = f"{advice} ({str(self.error).partition(chr(10))[0]})"
        return f"`{self.path}` ({_type_name(self.value)}){verb}; {what}"


# A piece of a value: its path, the value, and the name of the function or class that uses it.
_Part = tuple[str, Any, str]


def _find_culprit(
    parts: Iterable[_Part], make: Callable[..., Any], seen: dict[int, Any] | None = None
) -> Culprit | None:
    """Find the innermost value that cannot be pickled, although each of its parts can."""
    seen = {} if seen is None else seen
    for path, value, user in parts:
        error = None if id(value) in seen else _error_of(make, value)
        if error is None:
            continue
        seen[id(value)] = value
        is_whole = isinstance(pickling.row_of(type(value)), str) or len(seen) > _MAX_LOOKS
        inside = [] if is_whole else list(islice(_parts(path, value, user), _MAX_PARTS))
        found = _find_culprit(inside, make, seen)
        if found is not None:
            return found
        if not any(id(inner) in seen for _, inner, _ in inside):
            return Culprit(path, value, user, error)
    return None


def _error_of(make: Callable[..., Any], value: Any) -> BaseException | None:
    try:
        make(pickling.NOWHERE, lambda _buffer: None).dump(value)
    except (Exception, SystemExit) as error:  # whatever a user's object does
        return error
    return None


def _parts(path: str, value: Any, user: str) -> Iterator[_Part]:
    if isinstance(value, types.FunctionType):
        for name, used in variables(value, pickling.used_globals(value)).items():
            yield name, used, value.__name__
    elif isinstance(value, type):
        for name, member in vars(value).items():
            yield f"{value.__name__}.{name}", member, value.__name__
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", member, user) for key, member in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"{path}[{index}]", member, user) for index, member in enumerate(value))
    else:
        held = _HELD if isinstance(value, _HOLDERS) else ()
        named = {name: getattr(value, name) for name in held if hasattr(value, name)}
        named |= getattr(value, "__dict__", {})
        named |= of_torch.parts_of_module(named)
        for name, member in named.items():
            yield f"{path}.{name}", member, user
        yield path, type(value), user


def variables(function: types.FunctionType, names: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a function uses, by name: globals, closure variables, and defaults."""
    code = function.__code__
    found = dict(names)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        # A name of an enclosing function may have no value yet.
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    found.update(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    found.update(function.__kwdefaults__ or {})
    return found


def arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by parameter name.

    If the function's signature is unknown or does not fit the arguments, positional ones are called
    ``args[0]`` and so on.
    """
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {f"args[{index}]": value for index, value in enumerate(args)} | kwargs


def _type_name(value: object) -> str:
    """Return the name of a value's type for a message: "Net", or "sqlite3.Connection"."""
    kind = type(value)
    if kind.__module__ in ("builtins", "__main__") or kind.__module__.startswith("notebook_accel"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def cannot_travel(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: BaseException,
) -> LaunchError:
    """Return the error for a call that could not be pickled; its message names the value at fault.

    ``error`` is the exception that pickling the call raised; the message quotes it if no single
    value is at fault.
    """
    inner = getattr(function, "func", function)  # of a partial
    name = getattr(inner, "__name__", None) or _type_name(inner)
    given = arguments(function, args, kwargs).items()
    parts = [(name, function, ""), *((label, value, name) for label, value in given)]
    culprit = _find_culprit(parts, CallPickler)
    if culprit is None:
        return LaunchError(f"`{name}` cannot travel to the ranks; {error}")
    used = f", used in {culprit.user}," if culprit.user else ""
    return LaunchError(culprit.sentence(f"{used} cannot travel", "create it inside the function"))


def cannot_be_pushed(name: str, value: object, error: BaseException) -> LaunchError:
    """Return the error for a notebook variable that could not be pickled for a session."""
    culprit = _find_culprit([(name, value, "")], CallPickler) or Culprit(name, value, "", error)
    advice = "make it in a cell of the session"
    return LaunchError(culprit.sentence(" cannot travel to the session", advice))


def part_that_cannot_return(
    value: object, make: Callable[..., ResultPickler], error: BaseException
) -> tuple[Any, str]:
    """Return the part of a result that cannot be pickled, and a sentence that names it.

    ``error`` is the exception that pickling the result by ``make`` raised; if no single part is at
    fault, the result itself is returned.
    """
    culprit = _find_culprit([("result", value, "")], make) or Culprit("result", value, "", error)
    return culprit.value, _sentence_of_result(culprit)


def direct_parts_that_cannot_return(
    value: object, make: Callable[..., ResultPickler]
) -> list[tuple[Any, str]]:
    """Return the entries or attributes of a result that ``make`` cannot pickle; each's sentence."""
    return [
        (part, _sentence_of_result(Culprit(path, part, "", error)))
        for path, part, _ in islice(_parts("result", value, ""), _MAX_PARTS)
        if (error := _error_of(make, part)) is not None
    ]


def _sentence_of_result(culprit: Culprit) -> str:
    advice = "return values, tensors or models instead"
    # That is said of what a function uses: this was made inside.
    if isinstance(culprit.error, Refused) and "inside" in str(culprit.error):
        culprit = culprit._replace(error=Refused(advice))
    return culprit.sentence(", returned, cannot travel to the notebook", advice)


def pickled(dump: Callable[[], T], refusal: Callable[[BaseException], LaunchError]) -> T:
    """Return ``dump()``; if it fails, try again with objects of libraries by their names."""
    try:
        return dump()
    except (Exception, SystemExit):  # whatever a user's object does to be pickled
        with pickling.importing():
            try:
                return dump()
            except (Exception, SystemExit) as error:
                raise refusal(error) from cause(error)


def cause(error: BaseException) -> BaseException | None:
    """Return the exception that the user's error is raised ``from``: ``error`` or None.

    Return ``error`` if the user's code or another library raised it, since its traceback then helps
    the user. Return None if a pickler raised it: its traceback would only show the pickler.
    """
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    module = entry.tb_frame.f_globals.get("__name__", "") if entry is not None else ""
    is_picklers = str(module).startswith(("cloudpickle.", "notebook_accel."))
    return None if is_picklers else error
