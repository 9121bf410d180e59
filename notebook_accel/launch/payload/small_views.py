"""Tensors that show a small part of a large storage: only what they show is sent.

A tensor is pickled as its whole storage and its place in it, so ``big[:3]`` would carry all of
``big``. What must be sent is known once all tensors of a value were seen, since two that overlap
must overlap again where they arrive. So such a value is pickled three times:

    1. as usual, until a tensor is found that shows little of its storage: SmallView is raised
    2. into nothing, noting which bytes of each storage the tensors show
    3. with each storage cut into the parts that are shown

Values without such a tensor, nearly all, are pickled once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

__all__ = ["SmallView", "StorageParts", "StoragePolicy", "Survey", "Watch"]

# Below this, and where half of a storage is shown, the whole storage is sent.
_LARGE_BYTES = 1 << 20
# Parts begin where an element of any type may begin.
_ALIGNMENT = 16
_PLAIN = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")


class SmallView(Exception):  # noqa: N818
    """A tensor shows little of a large storage."""


class StoragePolicy:
    """Decides what of a storage is pickled. The pickler asks it about each tensor, and tells it of
    each storage that is pickled by itself. This one has everything pickled whole; ``Watch`` raises
    at the first small view, ``Survey`` notes what is shown, ``StorageParts`` cuts.
    """

    def tensor(self, tensor: Any, reduced: Any) -> Any:
        """How the tensor is pickled, which would be pickled as ``reduced``."""
        return reduced

    def storage(self, storage: Any) -> None:
        """A storage is pickled whole."""


class Watch(StoragePolicy):
    """The first time: everything is pickled as usual.

    Raises:
        SmallView: a tensor shows little of a large storage.
    """

    def tensor(self, tensor: Any, reduced: Any) -> Any:
        if _storage_of(reduced) is not None:
            size = tensor.untyped_storage().nbytes()
            start, end = _shown(tensor)
            if size >= _LARGE_BYTES and 2 * (end - start) < size:
                raise SmallView
        return reduced


class Survey(StoragePolicy):
    """The second time: notes what is shown of each storage."""

    def __init__(self) -> None:
        self._shown: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)

    def tensor(self, tensor: Any, reduced: Any) -> Any:
        storage = _storage_of(reduced)
        if storage is None:
            return reduced
        self._shown[_key(storage)].append(_shown(tensor))
        return _with_storage(reduced, None, 0)

    def storage(self, storage: Any) -> None:
        self._shown[_key(storage)].append((0, storage.nbytes()))

    def parts(self) -> StorageParts:
        """What is to be sent of each storage."""
        return StorageParts({key: _joined(ranges, key[-1]) for key, ranges in self._shown.items()})


class StorageParts(StoragePolicy):
    """The third time: tensors lie in parts of their storages.

    Args:
        ranges: for each storage, the first byte and the end of each of its parts, in order.
    """

    def __init__(self, ranges: dict[tuple[Any, ...], list[tuple[int, int]]]) -> None:
        self._ranges = ranges
        self._parts: dict[tuple[Any, ...], Any] = {}

    def tensor(self, tensor: Any, reduced: Any) -> Any:
        storage = _storage_of(reduced)
        if storage is None:
            return reduced
        start, end = _shown(tensor)
        key = _key(storage)
        ranges = self._ranges.get(key, [])
        part = next((part for part in ranges if part[0] <= start and end <= part[1]), None)
        # A tensor that was made for this pickle alone (by a __getstate__, for example) had other
        # memory when the parts were noted: it is in none of them, and is sent whole.
        if part is None or part == (0, storage.nbytes()):
            return reduced
        first, last = part
        # One object for all tensors in this part; it shares the storage's memory.
        own = self._parts.setdefault((*key, first), storage[first:last])
        return _with_storage(reduced, own, (start - first) // tensor.element_size())


def _key(storage: Any) -> tuple[Any, ...]:
    return storage.device, storage.data_ptr(), storage.nbytes()


def _shown(tensor: Any) -> tuple[int, int]:
    """The first byte of its storage that a tensor shows, and the end of the last."""
    start = tensor.storage_offset()
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    length = sum((size - 1) * stride for size, stride in steps) + 1 if tensor.numel() else 0
    return start * tensor.element_size(), (start + length) * tensor.element_size()


def _joined(ranges: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The ranges in order, those that touch joined into one.

    Where the storage is small, or they make up half of it, one range is all of the storage.
    """
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        aligned = start // _ALIGNMENT * _ALIGNMENT
        if joined and aligned <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((aligned, end))
    is_most = size < _LARGE_BYTES or 2 * sum(end - start for start, end in joined) >= size
    return [(0, size)] if is_most else joined


def _storage_of(reduced: Any) -> Any:
    """The untyped storage of a tensor that torch pickles in its plain way, else None."""
    function, arguments = reduced[:2]
    name = getattr(function, "__name__", "")
    if name == "_rebuild_from_type_v2":
        return _storage_of((arguments[0], arguments[2]))
    if name not in _PLAIN:
        return None
    return getattr(arguments[0], "_untyped_storage", arguments[0])


def _with_storage(reduced: Any, storage: Any, offset: int) -> Any:
    """``reduced`` with another storage, and the tensor's place in it."""
    function, arguments, *rest = reduced
    if function.__name__ == "_rebuild_from_type_v2":
        inner, kind, inner_arguments, state = arguments
        _, changed = _with_storage((inner, inner_arguments), storage, offset)
        return (function, (inner, kind, changed, state), *rest)
    old, _, *others = arguments
    if storage is not None and hasattr(old, "_untyped_storage"):
        from torch.storage import TypedStorage

        make: Any = TypedStorage
        storage = make(wrap_storage=storage, dtype=old.dtype, _internal=True)
    return (function, (storage, offset, *others), *rest)
