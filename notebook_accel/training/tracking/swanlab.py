"""SwanLab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.tracking.base import RunTracker

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SwanLabTracker"]


class SwanLabTracker(RunTracker):
    """Logs to a run of ``swanlab.init(project=project_name, **init_kwargs)``."""

    name = "swanlab"
    module = "swanlab"
    package = "swanlab"

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add the settings to the run's config."""
        self.library().config.update(dict(values))
