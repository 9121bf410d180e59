"""Functions for tensors in lists, tuples, named tuples and mappings, in any nesting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")


def is_torch_tensor(tensor: object) -> bool:
    """Return whether a value is a tensor: the default test of :func:`recursively_apply`.

    Args:
        tensor: the value.
    """
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: object) -> bool:
    """Return whether a value is an instance of a named tuple.

    Args:
        data: the value.
    """
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Sequence[Any], generator: Iterator[Any]) -> Any:
    """Return the items of an iterator as a sequence of the type of ``obj``.

    Args:
        obj: a list, tuple or named tuple of the wanted type.
        generator: the items.

    Example:
        >>> from notebook_accel.utils import honor_type
        >>> honor_type((0, 0), iter([1, 2]))
        (1, 2)
    """
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
    """Return the structure with ``func(leaf, *args, **kwargs)`` in place of each leaf.

    Args:
        func: called with each leaf for which ``test_type`` returns True.
        data: lists, tuples, named tuples and mappings, in any nesting.
        *args: further arguments of ``func``.
        test_type: returns whether ``func`` is called with a leaf; by default, True for tensors.
        error_on_other_type: raise if there are other leaves, rather than keep them unchanged.
        **kwargs: further arguments of ``func``.

    Raises:
        TypeError: ``error_on_other_type`` is set, and ``test_type`` returns False for a leaf.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import recursively_apply
        >>> recursively_apply(torch.neg, {"x": torch.ones(2), "name": "x"})
        {'x': tensor([-1., -1.]), 'name': 'x'}
    """

    def apply(value: Any) -> Any:
        if test_type(value):
            return func(value, *args, **kwargs)
        if isinstance(value, (list, tuple)):
            return honor_type(value, (apply(item) for item in value))
        if isinstance(value, Mapping):
            return rebuild(value, {key: apply(item) for key, item in value.items()})
        if error_on_other_type:
            name = getattr(func, "__name__", "this function").strip("_")
            raise TypeError(
                f"{name} takes tensors in lists, tuples and dicts, but found a "
                f"{type(value).__name__} ({value!r:.60}); use gather_object for objects, "
                "or make a tensor of it"
            )
        return value

    return apply(data)


def rebuild(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return ``values`` as a mapping of the type, and with the attributes, of ``like``."""
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
    """Yield, in order, the values within nested lists, tuples and mappings (or ``data`` itself)."""
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from leaves(item)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from leaves(item)
    else:
        yield data


def leaves_with_paths(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (expression, item) for each item of :func:`leaves`; ``path`` begins every expression.

    An expression tells where the item is, such as ``path[0]['x']``.
    """
    if isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            yield from leaves_with_paths(item, f"{path}[{index}]")
    elif isinstance(data, Mapping):
        for key, item in data.items():
            yield from leaves_with_paths(item, f"{path}[{key!r}]")
    else:
        yield path, data


def num_bytes(data: Any, device: torch.device | None = None) -> int:
    """Return the bytes of this rank's part of the tensors in ``data``, each of them once.

    Args:
        device: the tensors on it count; None counts all.
    """
    tensors = {id(leaf): leaf for leaf in leaves(data) if isinstance(leaf, torch.Tensor)}
    local = (getattr(one, "to_local", one.detach)() for one in tensors.values())
    return sum(one.nbytes for one in local if device in (None, one.device))


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Return the structure with all its tensors on a device.

    An object with a method ``to`` (a tokenizer's batch, a graph) is moved by that method. Other
    objects do not change.

    Args:
        tensor: a tensor, or lists, tuples and mappings of tensors.
        device: the device.
        non_blocking: do not wait for copies from pinned memory, as in ``torch.Tensor.to``.
        skip_keys: keys of mappings whose values are not moved.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import send_to_device
        >>> send_to_device({"x": torch.ones(2)}, "cpu")["x"].device
        device(type='cpu')
    """
    keep = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def send(value: Any) -> Any:
        if callable(getattr(value, "to", None)):
            if non_blocking:
                # A `to` of its own may know of no copies in the background.
                with suppress(TypeError):
                    return value.to(device, non_blocking=True)
            return value.to(device)
        if isinstance(value, (list, tuple)):
            return honor_type(value, map(send, value))
        if isinstance(value, Mapping):
            moved = {key: item if key in keep else send(item) for key, item in value.items()}
            return rebuild(value, moved)
        return value

    return send(tensor)


def find_batch_size(data: Any) -> int | None:
    """Return the size of the first dimension of the first tensor that has dimensions, else None.

    Args:
        data: a tensor, or lists, tuples and mappings of tensors.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import find_batch_size
        >>> find_batch_size({"inputs": torch.ones(8, 3)})
        8
    """
    tensors = (leaf for leaf in leaves(data) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((tensor.shape[0] for tensor in tensors), None)


def convert_to_fp32(tensor: Any) -> Any:
    """Return the structure with every float16 and bfloat16 tensor converted to float32.

    Args:
        tensor: a tensor, or lists, tuples and mappings of tensors.

    Example:
        >>> import torch
        >>> from notebook_accel.utils import convert_to_fp32
        >>> convert_to_fp32(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    halves = (torch.float16, torch.bfloat16)
    return recursively_apply(
        torch.Tensor.float,
        tensor,
        test_type=lambda value: isinstance(value, torch.Tensor) and value.dtype in halves,
    )
