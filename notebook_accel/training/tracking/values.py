"""What is logged, brought to what trackers take: Python numbers by flat names."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch

from notebook_accel.training.settings.notices import notice_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["as_number", "flatten", "numbers_of", "with_numbers"]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values by name; those of a dictionary are named "key/inner key"."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{name}/")
        else:
            yield name, value


def as_number(value: Any) -> float | None:
    """The number in a Python number, or in a tensor or array of one number; else None."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        item = value.item()
        return float(item) if isinstance(item, numbers.Real) else None
    return None


def numbers_of(values: Mapping[str, Any], tracker: str = "") -> dict[str, float]:
    """The numbers among ``values``, by flat names; what is none is named once and left out.

    Args:
        values: Python numbers, tensors and arrays of one number, or dictionaries of them.
        tracker: the one that keeps them; "" for the run itself, which shows them.
    """
    found: dict[str, float] = {}
    for name, value in flatten(values):
        number = as_number(value)
        if number is None:
            whose, lost = (f"{tracker}: ", "not kept") if tracker else ("", "not shown")
            notice_once(
                f"no number {tracker} {name}",
                f"{whose}{name!r} is a {type(value).__name__}, no number: {lost}",
            )
        else:
            found[name] = number
    return found


def with_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as they are, tensors and arrays of one number as that number.

    For libraries that take images, tables and more among the numbers.
    """
    ready: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            ready[name] = with_numbers(value)
        else:
            number = None if isinstance(value, (bool, int, float)) else as_number(value)
            ready[name] = value if number is None else number
    return ready
