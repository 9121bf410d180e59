"""Who is to blame when something cannot be pickled, in the names that a person knows it by."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_accel.errors import LaunchError
from notebook_accel.launch.payload.pickling import (
    CallPickler,
    Discard,
    Refused,
    ResultPickler,
    remedy_of,
    used_globals,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "arguments",
    "cannot_be_pushed",
    "cannot_return",
    "cannot_travel",
    "cause",
    "variables",
]

# Values that are looked into: each is pickled once, with all that it holds.
_MAX_LOOKS = 100
# Attributes of torch modules whose entries a person knows as attributes of the module.
_FLATTENED = ("_modules", "_parameters", "_buffers")


class Culprit(NamedTuple):
    """The innermost value that cannot be pickled.

    Attributes:
        path: how a person would write it: "config['conn']".
        value: the value itself.
        user: name of the function or class that uses it, "" where nothing does.
        error: what pickling it alone raised.
    """

    path: str
    value: Any
    user: str
    error: BaseException

    @property
    def title(self) -> str:
        """The path and the type."""
        return f"`{self.path}` ({_type_name(self.value)})"

    def remedy_or(self, advice: str) -> str:
        """What to do instead: as the value's kind says, else the advice with what Python says."""
        if isinstance(self.error, Refused):
            return str(self.error)
        return f"{advice} ({str(self.error).partition(chr(10))[0]})"


# A piece of a value: its path, the value, and the name of the function or class that uses it.
_Part = tuple[str, Any, str]


def _find_culprit(
    parts: Iterable[_Part], attempt: Callable[[Any], BaseException | None]
) -> Culprit | None:
    """The innermost value among the parts for which ``attempt`` gives an error."""
    # Those that failed. In a cycle all do: one that fails since it leads back is not to blame.
    seen: set[int] = set()

    def search(parts: Iterable[_Part]) -> tuple[Culprit | None, bool]:
        """A culprit, and whether any part has failed."""
        has_failed = False
        for path, value, user in parts:
            error = None if id(value) in seen else attempt(value)
            has_failed |= error is not None or id(value) in seen
            if error is None:
                continue
            seen.add(id(value))
            is_whole = remedy_of(type(value)) is not None or len(seen) > _MAX_LOOKS
            found, is_inside = (None, False) if is_whole else search(_parts(path, value, user))
            if found or not is_inside:
                return found or Culprit(path, value, user, error), True
        return None, has_failed

    return search(parts)[0]


def _parts(path: str, value: Any, user: str) -> Iterator[_Part]:
    if isinstance(value, types.FunctionType):
        for name, used in variables(value, used_globals(value)).items():
            yield name, used, value.__name__
    elif isinstance(value, type):
        for name, member in vars(value).items():
            # A property, class method or static method fails by the function inside it.
            inner = getattr(member, "__func__", member)
            inner = member.fget if isinstance(member, property) else inner
            yield f"{value.__name__}.{name}", inner, value.__name__
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", member, user) for key, member in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"{path}[{index}]", member, user) for index, member in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__, user
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func, user
        yield from _parts(path, {**dict(enumerate(value.args)), **value.keywords}, user)
    else:
        for name, member in _attributes(value):
            yield f"{path}.{name}", member, user
        yield path, type(value), user


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    is_own = type(value).__module__ == "__main__"
    for name, member in getattr(value, "__dict__", {}).items():
        if name in _FLATTENED and isinstance(member, dict):
            yield from member.items()
        elif is_own or not name.startswith("_"):
            # The private attributes of a library's object tell a person nothing.
            yield name, member


def variables(function: types.FunctionType, names: dict[str, Any]) -> dict[str, Any]:
    """The given globals of a function, what it closes over, and its defaults."""
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
    """The arguments under the names that the function has for them."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {f"args[{index}]": value for index, value in enumerate(args)} | kwargs


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or _type_name(function)


def _type_name(value: object) -> str:
    """A value's type, as a person would write it."""
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
    """The error for a call that could not be pickled, which raised ``error``."""
    name = _name_of(function)
    given = arguments(function, args, kwargs).items()
    parts = [(name, function, ""), *((label, value, name) for label, value in given)]
    culprit = _find_culprit(parts, _attempt(CallPickler))
    if culprit is None:
        return LaunchError(f"`{name}` cannot travel to the ranks; {error}")
    used = f"used in {culprit.user}, " if culprit.user else ""
    what = culprit.remedy_or("create it inside the function")
    return LaunchError(f"{culprit.title}, {used}cannot travel; {what}")


def cannot_be_pushed(name: str, value: object, error: BaseException) -> LaunchError:
    """The error for a name of the notebook whose value could not be pickled."""
    culprit = _find_culprit([(name, value, "")], _attempt(CallPickler))
    culprit = culprit or Culprit(name, value, "", error)
    what = culprit.remedy_or("make it in a cell of the session")
    return LaunchError(f"{culprit.title} cannot travel to the session; {what}")


def cannot_return(value: object, sent: Sequence[Any], error: BaseException) -> TypeError:
    """The error for a result that could not be pickled, which raised ``error``."""
    attempt = _attempt(functools.partial(ResultPickler, sent=sent))
    culprit = _find_culprit([("result", value, "")], attempt)
    culprit = culprit or Culprit("result", value, "", error)
    what = culprit.remedy_or("return values, tensors or models instead")
    return TypeError(f"{culprit.title}, returned, cannot travel to the notebook; {what}")


def cause(error: BaseException) -> BaseException | None:
    """The error itself where code of the user's raised it, whose traceback then helps."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    module = entry.tb_frame.f_globals.get("__name__", "") if entry is not None else ""
    is_picklers = str(module).startswith(("cloudpickle.", "notebook_accel."))
    return None if is_picklers else error


def _attempt(
    make: Callable[[Any, Callable[[Any], Any]], Any],
) -> Callable[[Any], BaseException | None]:
    """A function that pickles a value, keeps nothing of it, and gives what that raised."""

    def attempt(value: Any) -> BaseException | None:
        try:
            make(Discard(), lambda _buffer: None).dump(value)
        except (Exception, SystemExit) as error:  # whatever a user's object does
            return error
        return None

    return attempt
