"""Whether a function looks as if it had something to train."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accel.launch.payload import pack_call

if TYPE_CHECKING:
    from collections.abc import Callable


def _imports() -> None:
    import torch.nn  # noqa: F401


def _imports_from() -> type:
    from torch.utils.data import Dataset

    return Dataset


def _uses_global() -> int:
    return torch.get_num_threads()


def _nothing(*given: Any) -> int:
    return len(given)


def _uses_math() -> float:
    return math.pi


@pytest.mark.parametrize(
    ("function", "given", "uses_torch"),
    [
        (_imports, (), True),
        (_imports_from, (), True),
        (_uses_global, (), True),
        (_nothing, (torch.nn.Linear(1, 1),), True),
        (_nothing, (DataLoader([1]),), True),
        (_nothing, (torch.nn.Linear,), True),
        (_nothing, (1, "torch", [2]), False),
        (_uses_math, (), False),
        (print, (), False),
    ],
)
def test_what_uses_torch(
    function: Callable[..., Any], given: tuple[Any, ...], uses_torch: bool
) -> None:
    assert pack_call(function, given).uses_torch is uses_torch
