"""The run's own metrics: shown live, and kept in ``run.metrics``."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.launch.rank import current
from notebook_accel.training.notices import notice_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["report"]


def report(values: Mapping[str, Any], step: int | None = None) -> None:
    """Show the numbers among ``values``; those of a dictionary are named "key/inner key".

    Args:
        values: Python numbers, tensors and arrays of one number, or dictionaries of them.
        step: of the training.
    """
    numbers_found: dict[str, float] = {}
    for name, value in _flat(values):
        number = _as_number(value)
        if number is None:
            notice_once(
                f"metric {name}", f"{name!r} is a {type(value).__name__}, no number: not shown"
            )
        else:
            numbers_found[name] = number
    if numbers_found:
        current().metric(numbers_found, None if step is None else int(step))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}/")
        else:
            yield name, value


def _as_number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        item = value.item()
        return float(item) if isinstance(item, numbers.Real) else None
    return None
