"""The trackers of an ``Accelerator``: the notebook's own live one, and a blank on other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.training.processes import ProcessView
from notebook_accel.training.tracking import run_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GeneralTracker", "LiveTracker", "TrackerView"]


class GeneralTracker:
    """What a tracker can be asked; by itself it takes everything and keeps nothing.

    That is what ``get_tracker`` gives on ranks that don't track, so that scripts need no branch.

    Attributes:
        name: by which ``get_tracker`` finds it.
        requires_logging_directory: whether it writes files.
        main_process_only: whether it is rank 0's alone.
    """

    name: str = "blank"
    requires_logging_directory: bool = False
    main_process_only: bool = True

    @property
    def tracker(self) -> Any:
        """The library's own object behind it."""
        return None

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the settings of the training."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers of a step."""

    def finish(self) -> None:
        """Write what is not written yet."""


class LiveTracker(GeneralTracker):
    """Shows numbers in the run's view while it goes on, and keeps them in ``run.metrics``."""

    name = "notebook"

    @property
    def tracker(self) -> LiveTracker:
        """Itself: there is no library behind it."""
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Show numbers; what is none is named once and left out."""
        run_metrics.report(values, step)


class TrackerView(ProcessView):
    """Part of ``Accelerator``: its trackers."""

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Those that this rank feeds."""
        return [LiveTracker()] if self.is_main_process else []

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Give the tracker of this name; on ranks that don't track, one that keeps nothing.

        Args:
            name: "notebook" for the live one.
            unwrap: give the library's own object instead.

        Raises:
            ConfigError: there is no such tracker.
        """
        if not self.is_main_process:
            return GeneralTracker()
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = ", ".join(repr(tracker.name) for tracker in self.trackers)
        raise ConfigError(f"get_tracker({name!r}): there is no such tracker; there is {names}")
