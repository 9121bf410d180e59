"""The trackers of an ``Accelerator``: made, fed and finished on the main process alone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from notebook_accel.launch.rank import current
from notebook_accel.training.tracking.base import GeneralTracker, numbers_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_accel.training.settings.handlers import ProjectConfiguration

__all__ = ["LiveTracker", "Tracking"]


class Tracking:
    """What ``log_with`` asks for, and on the main process the trackers of the training.

    Attributes:
        asked: classes to make, and trackers that were made.
        trackers: those that are fed, the notebook's own among them; code may add more.
        is_started: whether ``init_trackers`` was called.
    """

    def __init__(
        self,
        asked: Sequence[type[GeneralTracker] | GeneralTracker],
        project: ProjectConfiguration,
    ) -> None:
        self.asked = asked
        self.trackers: list[GeneralTracker] = [LiveTracker()]
        self.is_started = False
        self._project = project
        self._finished: list[GeneralTracker] = []

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """The folder for what trackers write, as the project says now."""
        return self._project.logging_dir

    def feed(self, trackers: Iterable[GeneralTracker]) -> None:
        """Replace the trackers that ``log`` reaches; the notebook's own comes after them."""
        others = [one for one in trackers if not isinstance(one, LiveTracker)]
        self.trackers[:] = [*others, LiveTracker()]

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, dict[str, Any]],
    ) -> None:
        """Make the trackers, in place of earlier ones; begin each and give it the settings."""
        self.finish()
        self._finished, self.is_started = [], True
        self.feed([])
        for one in self.asked:
            tracker: Any = one
            if isinstance(one, type):
                folder = [self.logging_dir] if one.requires_logging_directory else []
                # A user's own class takes what it likes: ours are all made like this.
                tracker = tracker(project_name, *folder, **init_kwargs.get(one.name, {}))
            tracker.start()
            # Only what has started is fed and finished.
            self.feed([*self.trackers, tracker])
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(dict(config))

    def finish(self) -> None:
        """Finish each tracker once, also where another one fails."""
        waiting = [
            one for one in self.trackers if not any(one is other for other in self._finished)
        ]
        self._finished += waiting
        with ExitStack() as stack:
            for tracker in waiting:
                stack.callback(tracker.finish)


class LiveTracker(GeneralTracker):
    """Shows numbers in the run's view while it goes on, and keeps them in ``run.metrics``."""

    name = "notebook"
    requires_logging_directory = False

    @property
    def tracker(self) -> LiveTracker:
        """Return the tracker itself: there is no library behind it."""
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Show numbers; what is none is named once and left out."""
        found = numbers_of(values)
        if found:
            current().metric(found, step)
