"""The tracker for Weights & Biases (wandb)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notebook_accel.training.tracking.tracker import LibraryTracker, with_numbers


class WandBTracker(LibraryTracker):
    """Logs to a run that ``wandb.init(project=project_name, **init_kwargs)`` begins."""

    name = "wandb"
    module = "wandb"
    main_process_only = False
    run = LibraryTracker.tracker

    def start(self) -> None:
        """Begin the wandb run."""
        self._run = self.library().init(project=self.run_name, **self.init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, and any other values that wandb takes, such as tables or histograms."""
        self._run.log(with_numbers(values), step=step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images: each name has a list of them, as arrays, PIL images or paths of files."""
        image = self.library().Image
        ready = {name: [image(one) for one in images] for name, images in values.items()}
        self._run.log(ready, step=step, **kwargs)

    def finish(self) -> None:
        """End the wandb run, which sends all data that has not been sent yet."""
        self._run.finish()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add the settings to the config of the wandb run; replace earlier values of these."""
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
        """Log a table: ``columns`` and ``data`` (the rows), or a pandas ``dataframe``."""
        table = self.library().Table(columns=columns, data=data, dataframe=dataframe)
        self._run.log({table_name: table}, step=step, **kwargs)
