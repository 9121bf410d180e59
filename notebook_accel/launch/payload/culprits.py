"""Who is to blame when something cannot be pickled, in the names that a person knows it by."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import LaunchError
from notebook_accel.launch.payload.pickling import CallPickler, Discard, ResultPickler, used_globals
from notebook_accel.launch.payload.refusals import Refused, remedy_of

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

# Parts that lie deeper inside of a value are not named: nobody would know them by so long a path.
_MAX_DEPTH = 12
# Attributes of torch modules whose entries a person knows as attributes of the module.
_FLATTENED = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True)
class Culprit:
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

    @property
    def reason(self) -> str:
        """What Python says, in one line."""
        return str(self.error).partition("\n")[0]

    @property
    def remedy(self) -> str | None:
        """What to do instead, where somebody has said so."""
        return str(self.error) if isinstance(self.error, Refused) else None


@dataclass(frozen=True)
class ValuePart:
    """A piece of a value, with the path that leads to it."""

    path: str
    value: Any
    user: str


class _CulpritSearch:
    """Looks for the innermost value for which ``attempt`` gives an error.

    Values in a cycle all fail. The culprit is the innermost failing value whose failing parts, if
    it has any, only point back to it.
    """

    def __init__(self, attempt: Callable[[Any], BaseException | None]) -> None:
        self._attempt = attempt
        self._leads_to: dict[int, set[int]] = {}

    def first(self, parts: Iterable[ValuePart]) -> Culprit | None:
        """The first culprit among the parts."""
        found = self._among(parts, 0)
        return found if isinstance(found, Culprit) else None

    def _among(self, parts: Iterable[ValuePart], depth: int) -> Culprit | set[int]:
        """A culprit; where there is none, ids of the values to which failing parts lead back."""
        leads_to: set[int] = set()
        for part in parts:
            error = self._attempt(part.value)
            if error is None:
                continue
            found = self._inside(part, error, depth)
            if isinstance(found, Culprit):
                return found
            leads_to |= found
        return leads_to

    def _inside(self, part: ValuePart, error: BaseException, depth: int) -> Culprit | set[int]:
        key = id(part.value)
        known = self._leads_to.get(key)
        if known is not None:
            return known
        self._leads_to[key] = {key}
        refused = isinstance(error, Refused) and remedy_of(type(part.value)) is not None
        found = set() if refused or depth > _MAX_DEPTH else self._among(_parts(part), depth + 1)
        if isinstance(found, set):
            found.discard(key)
            self._leads_to[key] = found
        return found or Culprit(part.path, part.value, part.user, error)


def _parts(part: ValuePart) -> Iterator[ValuePart]:
    value = part.value
    if isinstance(value, types.FunctionType):
        for name, used in variables(value, used_globals(value)).items():
            yield ValuePart(name, used, value.__name__)
    elif isinstance(value, type):
        for name, member in vars(value).items():
            # A property, class method or static method fails by the function inside it.
            inner = getattr(member, "__func__", member)
            inner = member.fget if isinstance(member, property) else inner
            yield ValuePart(f"{value.__name__}.{name}", inner, value.__name__)
    else:
        for suffix, member in _members(value):
            yield ValuePart(part.path + suffix, member, part.user)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{index}]", member) for index, member in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), ("", value.keywords))
    else:
        yield from _attributes(value)
        yield "", type(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    is_own = type(value).__module__ == "__main__"
    for name, member in getattr(value, "__dict__", {}).items():
        if name in _FLATTENED and isinstance(member, dict):
            yield from ((f".{inner}", part) for inner, part in member.items())
        elif is_own or not name.startswith("_"):
            # The private attributes of a library's object tell a person nothing.
            yield f".{name}", member


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
    search = _CulpritSearch(_attempt(CallPickler))
    culprit = search.first(
        [
            ValuePart(name, function, ""),
            *(ValuePart(*part, name) for part in arguments(function, args, kwargs).items()),
        ]
    )
    if culprit is None:
        return LaunchError(f"`{name}` cannot travel to the ranks; {error}")
    used = f"used in {culprit.user}, " if culprit.user else ""
    what = culprit.remedy or f"create it inside the function ({culprit.reason})"
    return LaunchError(f"{culprit.title}, {used}cannot travel; {what}")


def cannot_be_pushed(name: str, value: object, error: BaseException) -> LaunchError:
    """The error for a name of the notebook whose value could not be pickled."""
    culprit = _CulpritSearch(_attempt(CallPickler)).first([ValuePart(name, value, "")])
    culprit = culprit or Culprit(name, value, "", error)
    what = culprit.remedy or f"make it in a cell of the session ({culprit.reason})"
    return LaunchError(f"{culprit.title} cannot travel to the session; {what}")


def cannot_return(value: object, sent: Sequence[Any], error: BaseException) -> TypeError:
    """The error for a result that could not be pickled, which raised ``error``."""
    search = _CulpritSearch(_attempt(functools.partial(ResultPickler, sent=sent)))
    culprit = search.first([ValuePart("result", value, "")])
    culprit = culprit or Culprit("result", value, "", error)
    what = culprit.remedy or f"return values, tensors or models instead ({culprit.reason})"
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
        with make(Discard(), lambda _buffer: None) as pickler:
            try:
                pickler.dump(value)
            except (Exception, SystemExit) as error:  # whatever a user's object does
                return error
        return None

    return attempt
