"""Copies of loaders that are of a class of ours and still of the user's.

A loader may be of a class that a library or the user derived from ``DataLoader``, whose overrides
must go on to hold. Its prepared copy is of a class made for the purpose, with both as its bases; no
module holds that class, so it is pickled by its bases.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

from torch.utils.data import DataLoader

__all__ = ["copy_as"]

Loader = TypeVar("Loader", bound=DataLoader[Any])


def copy_as(kind: type[Loader], loader: DataLoader[Any]) -> Loader:
    """A copy of ``loader`` that is of ``kind`` too; it shares the samplers and all else."""
    kinds: tuple[Any, Any] = (kind, type(loader))
    joined = _joined(*kinds)
    new: Loader = joined.__new__(joined)
    vars(new).update(vars(loader), _iterator=None)
    return new


@lru_cache
def _joined(kind: Any, other: Any) -> Any:
    """A class that is both: one of them if it derives from the other, else a new one."""
    if issubclass(kind, other) or issubclass(other, kind):
        return kind if issubclass(kind, other) else other
    members = {"__module__": kind.__module__, "__reduce_ex__": _reduce_joined}
    return type(kind)(kind.__name__, (kind, other), members)


def _reduce_joined(loader: DataLoader[Any], protocol: int) -> tuple[Any, ...]:  # noqa: ARG001
    """Pickle a loader of a class that no module has: by the two that it joins."""
    kind, other = type(loader).__bases__
    return _make_joined, (kind, other), {**vars(loader), "_iterator": None}


def _make_joined(kind: Any, other: Any) -> Any:
    joined = _joined(kind, other)
    return joined.__new__(joined)
