"""ClearML."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from notebook_accel.errors import ConfigError
from notebook_accel.training.tracking.base import LibraryTracker, on_main_process
from notebook_accel.training.tracking.values import numbers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ClearMLTracker"]


class ClearMLTracker(LibraryTracker):
    """Logs to the task that is open, or to a new one of ``Task.init(**init_kwargs)``.

    ``CLEARML_PROJECT`` and ``CLEARML_TASK`` go before the project's name.
    """

    name = "clearml"
    module = "clearml"
    package = "clearml"
    task = LibraryTracker.tracker

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self._is_ours = True

    @on_main_process
    def start(self) -> None:
        """Take the open task, which stays the user's to close, or begin one."""
        task_class = self.library().Task
        self._run = task_class.current_task()
        self._is_ours = self._run is None
        if self._is_ours:
            names = {
                "project_name": os.environ.get("CLEARML_PROJECT") or self.run_name,
                "task_name": os.environ.get("CLEARML_TASK") or self.run_name,
            }
            self._run = task_class.init(**{**names, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Connect the settings to the task."""
        self._run.connect_configuration(dict(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report numbers: as a series if there is a step, else as single values."""
        logger = self._run.get_logger()
        for name, value in numbers_of(values, self.name).items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _title_and_series(name)
                logger.report_scalar(
                    title=title, series=series, value=value, iteration=step, **kwargs
                )

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report an image a name, or a list of them."""
        logger = self._run.get_logger()
        for name, given in values.items():
            title, series = _title_and_series(name)
            for index, image in enumerate(given if isinstance(given, list) else [given]):
                part = series if index == 0 else f"{series} {index}"
                logger.report_image(title=title, series=part, iteration=step, image=image, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Report a table, given by rows or as a data frame.

        Raises:
            ConfigError: neither was given.
        """
        if dataframe is None and data is None:
            raise ConfigError(
                "log_table() got neither data nor dataframe: pass columns= and data=, or dataframe="
            )
        rows = data if columns is None or data is None else [columns, *data]
        title, series = _title_and_series(table_name)
        self._run.get_logger().report_table(
            title=title,
            series=series,
            table_plot=rows if dataframe is None else dataframe,
            iteration=step,
            **kwargs,
        )

    @on_main_process
    def finish(self) -> None:
        """Close the task if it was begun here."""
        if self._is_ours:
            self._run.close()


def _title_and_series(name: str) -> tuple[str, str]:
    """ "eval_loss" is the series "eval" of the plot "loss"; without a prefix it is "train"."""
    for series in ("eval", "test", "train"):
        if name.startswith(f"{series}_"):
            return name.removeprefix(f"{series}_"), series
    return name, "train"
