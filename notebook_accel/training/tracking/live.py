"""The notebook's own tracker, which is always there: numbers are shown while a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.launch.rank import current
from notebook_accel.training.tracking.base import GeneralTracker
from notebook_accel.training.tracking.values import numbers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LiveTracker"]


class LiveTracker(GeneralTracker):
    """Shows numbers in the run's view while it goes on, and keeps them in ``run.metrics``."""

    name = "notebook"
    requires_logging_directory = False

    @property
    def tracker(self) -> LiveTracker:
        """Itself: there is no library behind it."""
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Show numbers; what is none is named once and left out."""
        found = numbers_of(values)
        if found:
            current().metric(found, step)
