"""Comet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.tracking.base import LibraryTracker, on_main_process
from notebook_accel.training.tracking.values import as_number, flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CometMLTracker"]


class CometMLTracker(LibraryTracker):
    """Logs to the experiment of ``comet_ml.start(project_name=project_name, **init_kwargs)``."""

    name = "comet_ml"
    module = "comet_ml"
    package = "comet_ml>=3.41"
    writer = LibraryTracker.tracker

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        self._run = self.library().start(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the settings as parameters."""
        self._run.log_parameters(dict(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, and all else under "other"."""
        if step is not None:
            self._run.set_step(step)
        for name, value in flatten(values):
            number = as_number(value)
            if number is None:
                self._run.log_other(name, value, **kwargs)
            else:
                self._run.log_metric(name, number, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images a name."""
        for name, images in values.items():
            for image in images:
                self._run.log_image(image, name=name, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment, which uploads what is not uploaded yet."""
        self._run.end()
