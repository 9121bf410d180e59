"""Loaders that are of a class of ours and still of the user's.

A loader may be of a class that a library or the user derived from ``DataLoader``, whose overrides
must go on to hold. Its prepared copy is of a class made for the purpose, with both as its bases; no
module holds that class, so it is pickled by its bases.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

from torch.utils.data import DataLoader

__all__ = ["WholeLoader", "add_classes", "copy_as", "is_stateful"]

Loader = TypeVar("Loader", bound=DataLoader[Any])


class WholeLoader:
    """Attributes that Accelerate's loaders have of the torch loader that they keep inside. A loader
    of ours keeps none: it is one."""

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The loader itself."""
        assert isinstance(self, DataLoader)
        return self

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether the loader is torchdata's ``StatefulDataLoader`` too."""
        return is_stateful(self)


def is_stateful(loader: object) -> bool:
    """Whether a loader is torchdata's, asked without importing it."""
    return any(kind.__name__ == "StatefulDataLoader" for kind in type(loader).__mro__)


def copy_as(kind: type[Loader], loader: DataLoader[Any]) -> Loader:
    """A copy of ``loader`` that is of ``kind`` too; it shares the samplers and all else."""
    kinds: tuple[Any, Any] = (kind, type(loader))
    joined = _joined(*kinds)
    new: Loader = joined.__new__(joined)
    vars(new).update(vars(loader), _iterator=None)
    return new


def add_classes(loader: DataLoader[Any], first: Any, last: Any) -> None:
    """Let a loader be of two more classes: ``first`` comes before its own, ``last`` after them.

    Its ``__init__`` may be running: what is called from then on is looked up in all of them.
    """
    own: Any = type(loader)
    loader.__class__ = _joined(_joined(first, own), last)


@lru_cache
def _joined(kind: Any, other: Any) -> Any:
    """A class that is both: one of them if it derives from the other, else a new one."""
    if issubclass(kind, other) or issubclass(other, kind):
        return kind if issubclass(kind, other) else other
    members = {"__module__": kind.__module__, "__reduce_ex__": _reduce_joined}
    return type(kind)(kind.__name__, (kind, other), members)


def _reduce_joined(loader: DataLoader[Any], protocol: int) -> tuple[Any, ...]:  # noqa: ARG001
    """Pickle a loader of a class that no module has: by those that it joins."""
    return _make_joined, (_parts(type(loader)),), {**vars(loader), "_iterator": None}


def _parts(kind: Any) -> Any:
    """A class that a module has; for one that joins two, the pair of their parts."""
    if vars(kind).get("__reduce_ex__") is not _reduce_joined:
        return kind
    first, second = kind.__bases__
    return _parts(first), _parts(second)


def _make_joined(parts: Any) -> Any:
    joined = _of_parts(parts)
    return joined.__new__(joined)


def _of_parts(parts: Any) -> Any:
    """The class that :func:`_parts` was asked for."""
    return _joined(*map(_of_parts, parts)) if isinstance(parts, tuple) else parts
