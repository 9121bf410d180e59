"""MLflow: a tracking server, or the folder that ``MLFLOW_TRACKING_URI`` names."""

from __future__ import annotations

import json
import os
from itertools import islice
from typing import TYPE_CHECKING, Any

from notebook_accel.text_values import parse_flag
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.tracking.base import LibraryTracker, numbers_of, on_main_process

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MLflowTracker"]

# What a server takes at most: characters of a parameter, parameters in one request
# (mlflow.utils.validation.MAX_PARAM_VAL_LENGTH and MAX_PARAMS_TAGS_PER_BATCH).
_LONGEST_PARAMETER = 6000
_PARAMETERS_AT_ONCE = 100


class MLflowTracker(LibraryTracker):
    """Logs to a run of the experiment that has the project's name.

    ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS`` and ``MLFLOW_NESTED_RUN`` go
    before the arguments, as the library's users know it.
    """

    name = "mlflow"
    module = "mlflow"
    package = "mlflow"
    active_run = LibraryTracker.tracker

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        """Keep what ``start`` will need.

        Args:
            experiment_name: the project's name.
            logging_dir: where a new experiment keeps its files.
            run_id: a run to go on with.
            tags: of the run, as a dictionary or its JSON.
            nested_run: whether the run stands inside one that is open.
            run_name: of a new run.
            description: of the run.
        """
        environment = os.environ
        super().__init__(environment.get("MLFLOW_EXPERIMENT_NAME") or experiment_name or "Default")
        given = environment.get("MLFLOW_TAGS") or tags
        variable = "MLFLOW_NESTED_RUN"
        if variable in environment:
            nested_run = parse_flag(variable, environment[variable])
        self.logging_dir = logging_dir
        self.tags = json.loads(given) if isinstance(given, str) else given
        self.init_kwargs = {
            "run_id": environment.get("MLFLOW_RUN_ID") or run_id,
            "run_name": run_name,
            "nested": bool(nested_run),
            "tags": self.tags,
            "description": description,
        }

    @on_main_process
    def start(self) -> None:
        """Begin the run, in a new experiment if there is none of that name."""
        mlflow = self.library()
        found = mlflow.get_experiment_by_name(self.run_name)
        if found is None:
            folder = None if self.logging_dir is None else str(self.logging_dir)
            number = mlflow.create_experiment(self.run_name, folder, self.tags)
        else:
            number = found.experiment_id
        self._run = mlflow.start_run(experiment_id=number, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the settings as parameters, as text; one that is too long is named and left out."""
        short: dict[str, Any] = {}
        for name, value in values.items():
            if len(str(value)) > _LONGEST_PARAMETER:
                notice_once(
                    f"mlflow {name}",
                    f"mlflow: the setting {name!r} has {len(str(value))} characters; "
                    f"{_LONGEST_PARAMETER} are allowed: not kept",
                )
            else:
                short[name] = value
        rest = iter(short.items())
        while some := dict(islice(rest, _PARAMETERS_AT_ONCE)):
            self.library().log_params(some)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers; what is none is named once and left out."""
        self.library().log_metrics(numbers_of(values, self.name), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images a name."""
        # By itself the library leaves them to a thread, and a rank may end before that has.
        kwargs = {"synchronous": True, **kwargs}
        for name, images in values.items():
            for index, image in enumerate(images):
                key = name if len(images) == 1 else f"{name}/{index}"
                self.library().log_image(image, key=key, step=step or 0, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Keep a figure as a file of the run."""
        self.library().log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file with the run."""
        self.library().log_artifact(local_path, artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Keep a folder's files with the run."""
        self.library().log_artifacts(local_dir, artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End MLflow's run."""
        self.library().end_run()
