"""The trackers of an ``Accelerator``: made, fed and finished on the main process alone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.training.notices import notice_once
from notebook_accel.training.processes import ProcessView
from notebook_accel.training.tracking.base import BlankTracker, GeneralTracker
from notebook_accel.training.tracking.live import LiveTracker
from notebook_accel.training.tracking.registry import resolve_trackers

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_accel.training.settings import ProjectConfiguration

__all__ = ["TrackerView", "Tracking"]


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
        self._made: list[GeneralTracker] = []
        self._finished: list[GeneralTracker] = []

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """The folder for what trackers write, as the project says now."""
        return self._project.logging_dir

    def feed(self, trackers: Iterable[GeneralTracker]) -> None:
        """Feed these from now on, and the notebook's own after them."""
        others = [one for one in trackers if not isinstance(one, LiveTracker)]
        self.trackers[:] = [*others, LiveTracker()]

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, dict[str, Any]],
    ) -> None:
        """Make the trackers, begin each, those that code added too, and give each the settings."""
        self._end(self._made)
        old = [*self._made, *self.asked]
        added = [one for one in self.trackers if not _is_among(one, old)]
        self._made, self._finished, self.is_started = [], [], True
        self.feed([])
        for one in self.asked:
            tracker: Any = one
            if isinstance(one, type):
                folder = [self.logging_dir] if one.requires_logging_directory else []
                # A user's own class takes what it likes: ours are all made like this.
                tracker = tracker(project_name, *folder, **init_kwargs.get(one.name, {}))
            self._made.append(tracker)
        for tracker in (*self._made, *added):
            tracker.start()
            # Only what has started is fed and finished.
            self.feed([*self.trackers, tracker])
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(dict(config))

    def finish(self) -> None:
        """Finish each tracker once, also where another one fails."""
        self._end(self.trackers)

    def _end(self, trackers: Iterable[GeneralTracker]) -> None:
        waiting = [one for one in trackers if not _is_among(one, self._finished)]
        self._finished += waiting
        with ExitStack() as stack:
            for tracker in waiting:
                stack.callback(tracker.finish)


def _is_among(tracker: GeneralTracker, others: Iterable[object]) -> bool:
    return any(tracker is other for other in others)


class TrackerView(ProcessView):
    """Part of ``Accelerator``: its trackers."""

    _tracking: Tracking

    @property
    def log_with(self) -> Sequence[type[GeneralTracker] | GeneralTracker]:
        """What ``init_trackers`` will make, beside the notebook's own tracker; may be set."""
        return self._tracking.asked

    @log_with.setter
    def log_with(self, value: Any) -> None:
        self._tracking.asked = resolve_trackers(value, self._tracking.logging_dir)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Those that this rank feeds, to read and to change: what ``init_trackers`` made, what code
        has added, and the notebook's own."""
        return self._tracking.trackers if self.is_main_process else []

    @trackers.setter
    def trackers(self, value: Iterable[GeneralTracker]) -> None:
        self._tracking.feed(value)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Begin what ``log_with`` asks for, on the main process; the notebook's own needs none.

        Args:
            project_name: of the project or run, as the library calls it.
            config: the settings of the training.
            init_kwargs: arguments for the libraries' own start, by the tracker's name.
        """
        if self.is_main_process:
            self._tracking.start(project_name, config, init_kwargs or {})

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Give numbers to all trackers, those of rank 0 alone; they are shown live, and kept in
        ``run.metrics``.

        Args:
            values: Python numbers, tensors and arrays of one number, dictionaries of them, and
                what else the trackers take.
            step: of the training.
            log_kwargs: arguments for the trackers' ``log``, by the tracker's name.
        """
        if self.is_main_process and self.log_with and not self._tracking.is_started:
            notice_once(
                "init_trackers",
                "log() before init_trackers(): the trackers of log_with get nothing of it; call "
                "accelerator.init_trackers(project_name) first",
            )
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Give the tracker of this name; on ranks that don't track, one that keeps nothing.

        Args:
            name: such as "wandb", or "notebook" for the live one.
            unwrap: give the library's own object instead.

        Raises:
            ConfigError: there is no such tracker.
        """
        if not self.is_main_process:
            return BlankTracker()
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = ", ".join(repr(tracker.name) for tracker in self.trackers)
        raise ConfigError(
            f"get_tracker({name!r}): there is no such tracker; there is {names}. Ask for it with "
            "Accelerator(log_with=...) and call init_trackers() first"
        )
