"""Trackio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.tracking.base import RunTracker

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TrackioTracker"]


class TrackioTracker(RunTracker):
    """Logs to a run of ``trackio.init(project=project_name, **init_kwargs)``."""

    name = "trackio"
    module = "trackio"
    package = "trackio"

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add the settings to the run's config, which goes out with the first numbers."""
        self._run.config.update(values)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images: each of a list as "name/index"."""
        image = self.library().Image
        for name, images in values.items():
            ready = {f"{name}/{index}": image(one) for index, one in enumerate(images)}
            self._run.log(ready, step=step, **kwargs)
