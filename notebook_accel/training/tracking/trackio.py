"""Trackio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.tracking.base import LibraryTracker
from notebook_accel.training.tracking.values import with_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TrackioTracker"]


class TrackioTracker(LibraryTracker):
    """Logs to a run of ``trackio.init(project=project_name, **init_kwargs)``."""

    name = "trackio"
    module = "trackio"
    package = "trackio"
    main_process_only = False

    def start(self) -> None:
        """Begin the run."""
        self._run = self.library().init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add the settings to the run's config, which goes out with the first numbers."""
        self._run.config.update(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, and whatever else the library takes."""
        self._run.log(with_numbers(values), step=step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images: each of a list as "name/index"."""
        image = self.library().Image
        for name, images in values.items():
            ready = {f"{name}/{index}": image(one) for index, one in enumerate(images)}
            self._run.log(ready, step=step, **kwargs)

    def finish(self) -> None:
        """End the run, which sends what is not sent yet."""
        self._run.finish()
