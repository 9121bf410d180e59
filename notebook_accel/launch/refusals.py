"""What must not leave the process it lives in, and who is to blame when something cannot."""

from __future__ import annotations

import functools
import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["STAYS_HOME", "Culprit", "Refused", "find_culprit", "remedy_of", "type_name"]

# The attribute by which a class of ours (or of anybody's) says what to do instead.
STAYS_HOME = "_notebook_accel_stays_home"

_INSIDE = "make it inside the function"
_GROUP = "it belongs to a process group of this process; make it inside the function"
_UNWRAP = "it is bound to a process group of this process; send its `.module` and wrap it inside"
_WIDGET = "it lives in the notebook's page; print, or report from the function, instead"

# By name, since importing torch, a widget library or another launcher to ask would cost seconds.
_REMEDIES = {
    "IPython.core.interactiveshell.InteractiveShell": "it is the notebook itself",
    "accelerate.accelerator.Accelerator": _INSIDE,
    "accelerate.data_loader.DataLoaderDispatcher": _INSIDE,
    "accelerate.data_loader.DataLoaderShard": _INSIDE,
    "accelerate.optimizer.AcceleratedOptimizer": _INSIDE,
    "accelerate.scheduler.AcceleratedScheduler": _INSIDE,
    "ipywidgets.widgets.widget.Widget": _WIDGET,
    "lightning.fabric.fabric.Fabric": _INSIDE,
    "lightning_fabric.fabric.Fabric": _INSIDE,
    "notebook_accel.launch.rank.RankContext": _INSIDE,
    "notebook_accel.launch.run.Run": "take what you need of it (`run[0]`) and send that",
    "torch._C._distributed_c10d.ProcessGroup": _GROUP,
    "torch._C._distributed_c10d.Store": _GROUP,
    "torch.distributed.device_mesh.DeviceMesh": _GROUP,
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": _GROUP,
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _UNWRAP,
    "torch.distributed.tensor.DTensor": "call its `.full_tensor()` on all ranks and take that",
    "torch.nn.parallel.distributed.DistributedDataParallel": _UNWRAP,
    "tqdm.std.tqdm": "make the bar inside the function, where it is shown live",
}

_MAX_DEPTH = 12
# Attributes of torch modules whose entries a person knows as attributes of the module.
_FLATTENED = ("_modules", "_parameters", "_buffers")


class Refused(Exception):  # noqa: N818 (never seen by a user; a fact, not an error)
    """This object would arrive, but would be wrong there; the text is the remedy."""


def remedy_of(kind: type) -> str | None:
    """What to do instead of sending an instance of ``kind``; None where it may travel."""
    remedy = getattr(kind, STAYS_HOME, None)
    if isinstance(remedy, str):
        return remedy
    for base in kind.__mro__:
        remedy = _REMEDIES.get(f"{base.__module__}.{base.__qualname__}")
        if remedy:
            return remedy
    return None


def type_name(value: object) -> str:
    """A value's type, as a person would write it."""
    kind = type(value)
    if kind.__module__ in ("builtins", "__main__") or kind.__module__.startswith("notebook_accel"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class Culprit:
    """The innermost value that cannot be pickled.

    Attributes:
        path: how a person would write it: "config['conn']".
        value: it.
        user: name of the function or class that uses it, "" where nothing does.
        error: what pickling it alone raised.
    """

    path: str
    value: Any
    user: str
    error: Exception

    @property
    def remedy(self) -> str | None:
        """What to do instead, where somebody has said so."""
        return str(self.error) if isinstance(self.error, Refused) else None


@dataclass(frozen=True)
class Part:
    """A piece of a value, with the path that leads to it."""

    path: str
    value: Any
    user: str


class _Search:
    def __init__(
        self,
        attempt: Callable[[Any], Exception | None],
        variables: Callable[[types.FunctionType], dict[str, Any]],
    ) -> None:
        self._attempt = attempt
        self._variables = variables
        self._seen: set[int] = set()

    def first(self, parts: Iterable[Part], depth: int = 0) -> tuple[Culprit | None, bool]:
        """The first culprit among the parts, and whether any of them fails at all."""
        fails = False
        for part in parts:
            error = self._attempt(part.value)
            if error is None:
                continue
            fails = True
            culprit = self._inside(part, error, depth)
            if culprit:
                return culprit, True
        return None, fails

    def _inside(self, part: Part, error: Exception, depth: int) -> Culprit | None:
        """The culprit in a part that fails; None where only parts seen before do."""
        if id(part.value) in self._seen:
            return None
        self._seen.add(id(part.value))
        if not isinstance(error, Refused) or remedy_of(type(part.value)) is None:
            below = self._parts(part) if depth < _MAX_DEPTH else ()
            culprit, fails = self.first(below, depth + 1)
            if culprit or fails:
                return culprit
        return Culprit(part.path, part.value, part.user, error)

    def _parts(self, part: Part) -> Iterator[Part]:
        value = part.value
        if isinstance(value, types.FunctionType):
            for name, used in self._variables(value).items():
                yield Part(name, used, value.__name__)
        elif isinstance(value, type):
            for name, member in vars(value).items():
                yield Part(f"{value.__name__}.{name}", _plain(member), value.__name__)
        else:
            for suffix, member in _members(value):
                yield Part(part.path + suffix, member, part.user)


def _plain(member: Any) -> Any:
    """The function inside of a class's descriptor."""
    if isinstance(member, property):
        return member.fget
    return getattr(member, "__func__", member)


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
    for name, member in getattr(value, "__dict__", {}).items():
        if name in _FLATTENED and isinstance(member, dict):
            yield from ((f".{inner}", part) for inner, part in member.items())
        else:
            yield f".{name}", member


def find_culprit(
    parts: Iterable[tuple[str, Any, str]],
    *,
    attempt: Callable[[Any], Exception | None],
    variables: Callable[[types.FunctionType], dict[str, Any]],
) -> Culprit | None:
    """Look for the innermost value that cannot be pickled.

    Args:
        parts: path, value and user of what to look into.
        attempt: pickles a value and gives what that raised.
        variables: the names that a function uses, with their values; empty where the function
            goes by reference.
    """
    found, _ = _Search(attempt, variables).first(Part(*part) for part in parts)
    return found
