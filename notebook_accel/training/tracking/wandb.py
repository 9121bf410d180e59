"""Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accel.training.tracking.base import RunTracker

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["WandBTracker"]


class WandBTracker(RunTracker):
    """Logs to a run of ``wandb.init(project=project_name, **init_kwargs)``."""

    name = "wandb"
    module = "wandb"
    package = "wandb"

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add the settings to the run's config."""
        self._run.config.update(dict(values), allow_val_change=True)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given by columns and rows or as a data frame."""
        table = self.library().Table(columns=columns, data=data, dataframe=dataframe)
        self._run.log({table_name: table}, step=step, **kwargs)
