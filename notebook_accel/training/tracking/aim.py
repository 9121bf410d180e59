"""Aim: a repository in ``logging_dir``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.tracking.base import LibraryTracker, on_main_process
from notebook_accel.training.tracking.values import flatten, with_numbers

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["AimTracker"]


class AimTracker(LibraryTracker):
    """Logs to ``aim.Run(repo=logging_dir, **init_kwargs)``, named as the project."""

    name = "aim"
    module = "aim"
    package = "aim"
    requires_logging_directory = True
    writer = LibraryTracker.tracker

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        repository = None if self.aim_repo_path is None else str(self.aim_repo_path)
        self._run = self.library().Run(repo=repository, **self.init_kwargs)
        self._run.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the settings as the run's "hparams"."""
        self._run["hparams"] = dict(values)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track numbers, and whatever else the library takes."""
        for name, value in flatten(with_numbers(values)):
            self._run.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        **others: Any,
    ) -> None:
        """Track an image a name, or a list of them; an image may be a pair with its caption.

        Args:
            values: the images by name.
            step: of the training.
            kwargs: arguments of ``aim.Image`` under "aim_image", of ``Run.track`` under "track".
            **others: arguments of ``Run.track`` too.
        """
        options = kwargs or {}
        for name, given in values.items():
            for one in given if isinstance(given, list) else [given]:
                image, caption = one if isinstance(one, tuple) else (one, "")
                ready = self.library().Image(image, caption=caption, **options.get("aim_image", {}))
                self._run.track(ready, name=name, step=step, **options.get("track", {}), **others)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self._run.close()
