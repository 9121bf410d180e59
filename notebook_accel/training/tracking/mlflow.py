"""The tracker for MLflow, which writes to the server or folder in ``MLFLOW_TRACKING_URI``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import islice
from typing import Any

from notebook_accel.config.checks import parse_flag
from notebook_accel.training.settings.notices import notice_once
from notebook_accel.training.tracking.tracker import LibraryTracker, numbers_of, on_main_process

# What a server takes at most: characters of a parameter, parameters in one request
# (mlflow.utils.validation.MAX_PARAM_VAL_LENGTH and MAX_PARAMS_TAGS_PER_BATCH).
_LONGEST_PARAMETER = 6000
_PARAMETERS_AT_ONCE = 100


class MLflowTracker(LibraryTracker):
    """Logs to an MLflow run, in the experiment with the project's name.

    The environment variables ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS`` and
    ``MLFLOW_NESTED_RUN`` override the arguments, as in Accelerate.
    """

    name = "mlflow"
    module = "mlflow"
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
        """Store the arguments until ``start`` uses them.

        Args:
            experiment_name: name of the experiment: the project's name.
            logging_dir: folder for the files of a new experiment; None leaves it to MLflow.
            run_id: the id of an existing run to continue; None begins a new one.
            tags: tags of the run (and of a new experiment), as a dictionary or as JSON text.
            nested_run: whether to make the run a child of the run that is active.
            run_name: name of a new run; None leaves it to MLflow.
            description: description of the run.
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
        """Begin the MLflow run; first create the project's experiment if it does not exist."""
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
        """Log the settings as MLflow parameters.

        A setting whose text exceeds MLflow's limit of 6000 characters is left out, with a notice
        the first time for each name.
        """
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
        """Log numbers as MLflow metrics.

        A value that is no number is left out, with a notice the first time for each name.
        """
        self.library().log_metrics(numbers_of(values, self.name), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images: each name has a list of them. ``kwargs`` go to ``mlflow.log_image``."""
        # By itself the library leaves them to a thread, and a rank may end before that has.
        kwargs = {"synchronous": True, **kwargs}
        for name, images in values.items():
            for index, image in enumerate(images):
                key = name if len(images) == 1 else f"{name}/{index}"
                self.library().log_image(image, key=key, step=step or 0, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Save a figure (matplotlib or plotly) as the file ``artifact_file`` of the run."""
        self.library().log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Copy a local file into the run's artifacts, in the folder ``artifact_path`` if given."""
        self.library().log_artifact(local_path, artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Copy a local folder's files into the run's artifacts, in ``artifact_path`` if given."""
        self.library().log_artifacts(local_dir, artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End the MLflow run."""
        self.library().end_run()
