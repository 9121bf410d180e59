"""Tensors in lists, tuples, named tuples and mappings, in any nesting."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch

__all__ = [
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "honor_type",
    "ignorant_find_batch_size",
    "is_namedtuple",
    "is_torch_tensor",
    "leaves",
    "leaves_with_paths",
    "listify",
    "merge_dicts",
    "move_to_device",
    "pad_input_tensors",
    "rebuild",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
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


def move_to_device(state: Any, device: torch.device | str | int) -> Any:
    """:func:`send_to_device`, as code that moves the state of an optimizer calls it."""
    return send_to_device(state, device)


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


# Ours raises nothing to ignore.
ignorant_find_batch_size = find_batch_size


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor; None where there is none."""
    found = (leaf.device for leaf in leaves(data) if isinstance(leaf, torch.Tensor))
    return next(found, None)


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001
    num_processes: int | None = None,  # noqa: ARG001
) -> Any:
    """Apply a slice to the first dimension of every tensor; those without one stay.

    Args:
        data: tensors in lists, tuples and mappings.
        tensor_slice: the rows.
        process_index, num_processes: accepted: what a ``slice_fn_for_dispatch`` is given.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[tensor_slice] if tensor.ndim else tensor

    return recursively_apply(cut, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join structures of the same form, tensor by tensor; what is no tensor stays as it is where
    there is one structure alone.

    Raises:
        TypeError: a leaf of several structures is not a tensor.
    """
    first = data[0]
    if isinstance(first, (list, tuple)):
        columns = zip(*data, strict=True)
        return honor_type(first, (concatenate(column, dim=dim) for column in columns))
    if isinstance(first, Mapping):
        joined = {key: concatenate([item[key] for item in data], dim=dim) for key in first}
        return rebuild(first, joined)
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if len(data) == 1:
        return first
    raise TypeError(_refusal(concatenate, first))


def listify(data: Any) -> Any:
    """Every tensor as (nested lists of) Python numbers."""

    def plain(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).tolist()

    return recursively_apply(plain, data)


def convert_to_fp32(tensor: Any) -> Any:
    """Every float16 and bfloat16 tensor as float32."""

    def is_half(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)

    return recursively_apply(torch.Tensor.float, tensor, test_type=is_half)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives every float16 and bfloat16 tensor of a forward's outputs as float32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Fill up tensors with zeros until ranks can share them evenly.

    Args:
        tensor: in lists, tuples and mappings.
        batch_size: how many samples the tensors have along ``dim``; others stay as they are.
        num_processes: the length becomes a multiple of it.
        dim: of the samples.
    """
    missing = -batch_size % num_processes

    def pad(value: torch.Tensor) -> torch.Tensor:
        if value.ndim <= dim or value.shape[dim] != batch_size:
            return value
        shape = list(value.shape)
        shape[dim] = missing
        return torch.cat((value, value.new_zeros(shape)), dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Put all of ``source`` into ``destination``, dictionaries in dictionaries merged likewise.

    Returns:
        ``destination``, which is changed in place.
    """
    for key, value in source.items():
        there = destination.get(key)
        if isinstance(value, dict):
            destination[key] = merge_dicts(value, there if isinstance(there, dict) else {})
        else:
            destination[key] = value
    return destination
