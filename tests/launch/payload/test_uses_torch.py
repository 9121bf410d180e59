"""Whether a function looks as if it had something to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from notebook_accel.launch.payload import pack_call


def by_reference() -> int:
    return torch.get_num_threads()


def uses_torch(function: Callable[..., Any], *given: Any) -> bool:
    return pack_call(function, given).uses_torch


def test_what_uses_torch() -> None:
    def imports() -> None:
        import torch.nn  # noqa: F401

    def imports_from() -> type:
        from torch.utils.data import Dataset

        return Dataset

    def uses_global() -> int:
        return torch.get_num_threads()

    def nothing(*given: Any) -> int:
        return len(given)

    assert all(map(uses_torch, (imports, imports_from, uses_global, by_reference)))
    for given in (torch.nn.Linear(1, 1), DataLoader([1]), torch.nn.Linear):
        assert uses_torch(nothing, given)
