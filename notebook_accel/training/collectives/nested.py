"""Tensors in lists, tuples, named tuples and mappings, in any nesting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch

__all__ = [
    "convert_to_fp32",
    "find_batch_size",
    "honor_type",
    "is_namedtuple",
    "is_torch_tensor",
    "leaves",
    "leaves_with_paths",
    "rebuild",
    "recursively_apply",
    "send_to_device",
]

Value = TypeVar("Value")


def is_torch_tensor(tensor: object) -> bool:
    """The test that :func:`recursively_apply` makes unless it is given another."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: object) -> bool:
    """Whether ``data`` is an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Sequence[Any], generator: Iterator[Any]) -> Any:
    """What ``generator`` gives, as a sequence of the type of ``obj``, named tuples included."""
    kind: Any = type(obj)
    return kind(*generator) if is_namedtuple(obj) else kind(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Call ``func(leaf, *args, **kwargs)`` on each leaf of ``data``, and keep the structure.

    Args:
        func: gets each leaf for which ``test_type`` is true.
        data: lists, tuples, named tuples and mappings, in any nesting.
        *args: further arguments of ``func``.
        test_type: which leaves ``func`` gets (tensors).
        error_on_other_type: refuse other leaves, rather than keep them as they are.
        **kwargs: further arguments of ``func``.

    Raises:
        TypeError: a leaf of another type, with ``error_on_other_type``.
    """

    def apply(value: Any) -> Any:
        if test_type(value):
            return func(value, *args, **kwargs)
        if isinstance(value, (list, tuple)):
            return honor_type(value, (apply(item) for item in value))
        if isinstance(value, Mapping):
            return rebuild(value, {key: apply(item) for key, item in value.items()})
        if error_on_other_type:
            raise TypeError(_refusal(func, value))
        return value

    return apply(data)


def _refusal(func: Callable[..., Any], value: object) -> str:
    name = getattr(func, "__name__", "this function").strip("_")
    return (
        f"{name} takes tensors in lists, tuples and dicts, but found a "
        f"{type(value).__name__} ({value!r:.60}); use gather_object for objects, "
        "or make a tensor of it"
    )


def rebuild(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """``values`` as a mapping of the type of ``like``, with the attributes that it has beside."""
    if type(like) is dict:
        return values
    if not isinstance(like, MutableMapping):
        kind: Any = type(like)
        return kind(values)
    new = copy.copy(like)
    # A class that keeps its values in an attribute has the same one in its copy, and writing there
    # would change the original.
    for name, held in getattr(like, "__dict__", {}).items():
        if isinstance(held, MutableMapping) and vars(new).get(name) is held:
            vars(new)[name] = copy.copy(held)
    for key, value in values.items():
        new[key] = value
    return new


def leaves(data: Any) -> Iterator[Any]:
    """What is in ``data``, in order, without its lists, tuples and mappings."""
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from leaves(item)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from leaves(item)
    else:
        yield data


def leaves_with_paths(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What :func:`leaves` gives, each with the expression that leads there from ``path``."""
    if isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            yield from leaves_with_paths(item, f"{path}[{index}]")
    elif isinstance(data, Mapping):
        for key, item in data.items():
            yield from leaves_with_paths(item, f"{path}[{key!r}]")
    else:
        yield path, data


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Put every tensor of a nested structure on ``device``.

    An object that has a method ``to`` (a tokenizer's batch, a graph) is asked to move itself;
    any other object stays as it is.

    Args:
        tensor: the structure.
        device: where to put it.
        non_blocking: don't wait for the copies (from pinned memory).
        skip_keys: keys of mappings whose values stay where they are.
    """
    keep = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    return _send(tensor, device, non_blocking, keep)


def _send(value: Any, device: Any, non_blocking: bool, keep: set[str]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if callable(getattr(value, "to", None)):
        return _move_itself(value, device, non_blocking)
    if isinstance(value, (list, tuple)):
        return honor_type(value, (_send(item, device, non_blocking, keep) for item in value))
    if isinstance(value, Mapping):
        moved = {
            key: item if key in keep else _send(item, device, non_blocking, keep)
            for key, item in value.items()
        }
        return rebuild(value, moved)
    return value


def _move_itself(value: Any, device: Any, non_blocking: bool) -> Any:
    if not non_blocking:
        return value.to(device)
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # a `to` of its own that knows of no copies in the background
        return value.to(device)


def find_batch_size(data: Any) -> int | None:
    """Size of the first dimension of the first tensor that has one; None where there is none."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return leaf.shape[0]
    return None


def convert_to_fp32(tensor: Any) -> Any:
    """Every float16 and bfloat16 tensor as float32."""

    def is_half(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)

    return recursively_apply(torch.Tensor.float, tensor, test_type=is_half)
