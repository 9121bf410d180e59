"""The trackers of an ``Accelerator``: make, start and finish them, on the main process only.

A tracker sends the metrics of a training to a tool that stores them, such as TensorBoard.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from notebook_accel.rank.this_rank import current
from notebook_accel.training.settings.handlers import ProjectConfiguration
from notebook_accel.training.tracking.tracker import GeneralTracker, numbers_of


class Tracking:
    """The trackers of one ``Accelerator``; all ranks have this object, only rank 0 starts it."""

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
        """The folder for the files of trackers, as the project's settings have it now."""
        return self._project.logging_dir

    def feed(self, trackers: Iterable[GeneralTracker]) -> None:
        """Replace the trackers that ``Accelerator.log`` calls; add a ``LiveTracker`` at the end."""
        others = [one for one in trackers if not isinstance(one, LiveTracker)]
        self.trackers[:] = [*others, LiveTracker()]

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, dict[str, Any]],
    ) -> None:
        """Finish earlier trackers, then make and start those that ``log_with`` asks for.

        Args:
            config: settings of the training, which each tracker stores; None stores none.
        """
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
        """Finish each tracker that is not finished yet, even if another tracker raises."""
        waiting = [
            one for one in self.trackers if not any(one is other for other in self._finished)
        ]
        self._finished += waiting
        with ExitStack() as stack:
            for tracker in waiting:
                stack.callback(tracker.finish)


class LiveTracker(GeneralTracker):
    """The tracker that is always there: it shows numbers live in the notebook.

    The run that the launcher returns has them as ``run.metrics``. In ranks that our launcher did
    not start, nothing is shown.
    """

    name = "notebook"
    requires_logging_directory = False

    @property
    def tracker(self) -> LiveTracker:
        """Return the tracker itself: there is no library behind it."""
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Show numbers in the notebook.

        A value that is no number is left out, with a notice the first time for each name.
        """
        found = numbers_of(values)
        if found:
            current().metric(found, step)
