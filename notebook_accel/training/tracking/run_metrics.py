"""The run's own metrics: shown live, and kept in ``run.metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.launch.rank import current
from notebook_accel.training.tracking.values import numbers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["report"]


def report(values: Mapping[str, Any], step: int | None = None) -> None:
    """Show the numbers among ``values``; those of a dictionary are named "key/inner key".

    Args:
        values: Python numbers, tensors and arrays of one number, or dictionaries of them.
        step: of the training.
    """
    found = numbers_of(values)
    if found:
        current().metric(found, step)
