"""The run's own metrics: shown live, and kept in ``run.metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.launch.rank import current
from notebook_accel.training.notices import notice_once
from notebook_accel.training.tracking.values import as_number, flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["report"]


def report(values: Mapping[str, Any], step: int | None = None) -> None:
    """Show the numbers among ``values``; those of a dictionary are named "key/inner key".

    Args:
        values: Python numbers, tensors and arrays of one number, or dictionaries of them.
        step: of the training.
    """
    numbers_found: dict[str, float] = {}
    for name, value in flatten(values):
        number = as_number(value)
        if number is None:
            notice_once(
                f"metric {name}", f"{name!r} is a {type(value).__name__}, no number: not shown"
            )
        else:
            numbers_found[name] = number
    if numbers_found:
        current().metric(numbers_found, step)
