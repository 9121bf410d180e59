"""SwanLab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.tracking.base import LibraryTracker
from notebook_accel.training.tracking.values import with_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SwanLabTracker"]


class SwanLabTracker(LibraryTracker):
    """Logs to a run of ``swanlab.init(project=project_name, **init_kwargs)``."""

    name = "swanlab"
    module = "swanlab"
    package = "swanlab"
    main_process_only = False

    def start(self) -> None:
        """Begin the run."""
        self._run = self.library().init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add the settings to the run's config."""
        self.library().config.update(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, and whatever else the library takes."""
        self._run.log(with_numbers(values), step=step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images a name."""
        image = self.library().Image
        ready = {name: [image(one) for one in images] for name, images in values.items()}
        self._run.log(ready, step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        self._run.finish()
