"""DVCLive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.notices import notice_once
from notebook_accel.training.tracking.base import LibraryTracker, on_main_process
from notebook_accel.training.tracking.values import as_number, flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(LibraryTracker):
    """Logs to ``dvclive.Live(**init_kwargs)``, or to a ``live`` of the user; it has no names."""

    name = "dvclive"
    module = "dvclive"
    package = "dvclive"
    live = LibraryTracker.tracker

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self._run = live

    @on_main_process
    def start(self) -> None:
        """Begin, unless the user's own has begun."""
        if self._run is None:
            self._run = self.library().Live(**self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the settings as parameters."""
        self._run.log_params(dict(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and texts, and go on to the next step; the rest is named once."""
        if step is not None:
            self._run.step = step
        for name, value in flatten(values):
            kept = value if isinstance(value, str) else as_number(value)
            if kept is None:
                kind = type(value).__name__
                notice_once(f"dvclive {name}", f"dvclive: {name!r} is a {kind}: not kept")
            else:
                self._run.log_metric(name, kept, **kwargs)
        self._run.next_step()

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images: those of a list as "name/index.png"."""
        if step is not None:
            self._run.step = step
        for name, images in values.items():
            for index, image in enumerate(images):
                self._run.log_image(f"{name}/{index}.png", image, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End it, which writes its summary."""
        self._run.end()
