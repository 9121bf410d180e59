"""Shapes and types of tensors in place of the tensors, and empty tensors made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from notebook_accel.training.nested import recursively_apply

__all__ = [
    "TensorInformation",
    "get_data_structure",
    "get_shape",
    "initialize_tensors",
    "is_tensor_information",
]


@dataclass
class TensorInformation:
    """A tensor without its values."""

    shape: torch.Size
    """Its sizes."""
    dtype: torch.dtype
    """Its type."""


def is_tensor_information(tensor_info: object) -> bool:
    """Whether this stands for a tensor."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """The same lists, tuples and mappings, with :class:`TensorInformation` for each tensor."""

    def describe(tensor: torch.Tensor) -> TensorInformation:
        return TensorInformation(shape=tensor.shape, dtype=tensor.dtype)

    return recursively_apply(describe, data)


def get_shape(data: Any) -> Any:
    """The same lists, tuples and mappings, with a list of its sizes for each tensor."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The reverse of :func:`get_data_structure`, with tensors whose values are not set."""

    def make(info: TensorInformation) -> torch.Tensor:
        return torch.empty(info.shape, dtype=info.dtype)

    return recursively_apply(make, data_structure, test_type=is_tensor_information)
