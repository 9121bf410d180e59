"""Each tracker by its library: the real one where it is installed and runs without a network.

For the others a stand-in has the signatures of the real library (versions named there), so that a
wrong argument is a TypeError here too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from notebook_accel.tracking import LOGGER_TYPE_TO_CLASS

from notebook_accel import Accelerator, ConfigError
from tests.training.harness import run_ranks
from tests.training.single import Told, be, fresh_rank  # noqa: F401

CONFIG = {"lr": 0.1, "name": "tiny", "nested": {"layers": [1, 2]}, "flag": True}


def train(name: str, folder: str, /, **init_kwargs: Any) -> Any:
    """What the tests let every tracker keep."""
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder)
    accelerator.init_trackers("project", CONFIG, init_kwargs={name: init_kwargs})
    for step in range(2):
        loss = torch.tensor(0.5, requires_grad=True) / (step + 1)
        accelerator.log({"loss": loss, "eval": {"f1": np.float32(0.25)}}, step=step)
    return accelerator


# ------------------------------------------------------------------ the real libraries


def test_tensorboard_writes_events_and_settings(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    accelerator = train("tensorboard", str(tmp_path))
    accelerator.log({"note": "hello", "three": torch.ones(3)}, step=0)
    images = np.zeros((2, 3, 4, 4), dtype=np.uint8)
    accelerator.get_tracker("tensorboard").log_images({"x": images}, step=0)
    assert type(accelerator.get_tracker("tensorboard", unwrap=True)).__name__ == "SummaryWriter"
    accelerator.end_training()
    seen = accumulator(str(tmp_path / "project"))
    seen.Reload()
    assert [(event.step, event.value) for event in seen.Scalars("loss")] == [(0, 0.5), (1, 0.25)]
    assert seen.Tags()["images"]
    assert "note/text_summary" in seen.Tags()["tensors"]
    (settings,) = tmp_path.glob("project/*/hparams.yml")
    assert "layers:" in settings.read_text()
    assert len(list(tmp_path.glob("project/*/events*"))) == 2  # hparams, and the dictionary's plot


def test_tensorboard_x_writes_where_tensorboard_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class SummaryWriter:  # tensorboardX 2.6
        def __init__(self, logdir: Any = None, comment: str = "", flush_secs: int = 120) -> None:
            seen.append((logdir, flush_secs))

        def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None) -> None:
            seen.append((tag, scalar_value, global_step))

        def flush(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setitem(sys.modules, "tensorboard", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tensorboard is not installed"):
        Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    stand_in(monkeypatch, "tensorboardX", SummaryWriter=SummaryWriter)
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("project", init_kwargs={"tensorboard": {"flush_secs": 3}})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert seen == [(str(tmp_path / "project"), 3), ("loss", 0.5, 1)]


MLFLOW = {
    "MLFLOW_EXPERIMENT_NAME": "named",
    "MLFLOW_RUN_ID": "run 1",
    "MLFLOW_TAGS": '{"team": "them"}',
    "MLFLOW_NESTED_RUN": "yes",
}


@pytest.mark.parametrize("variables", [{}, MLFLOW])
def test_mlflow_is_started_as_accelerate_starts_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run is to go on with, or to stand in: arguments, and the variables before them."""
    from accelerate.tracking import MLflowTracker as Peer
    from notebook_accel.tracking import MLflowTracker

    made: list[Any] = []
    known = SimpleNamespace(experiment_id="7")
    stand_in(
        monkeypatch,
        "mlflow",
        get_experiment_by_name=lambda name: made.append(name) or known,
        search_experiments=lambda filter_string: made.append(filter_string[8:-1]) or [known],
        start_run=lambda **arguments: made.append(arguments),
    )
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    given: dict[str, Any] = {"run_id": "run 0", "tags": '{"team": "us"}', "nested_run": True}
    for kind in (MLflowTracker, Peer):
        for arguments in ({}, {**given, "run_name": "first", "description": "why"}):
            kind("project", **arguments).start()  # type: ignore[arg-type]
    assert made[:4] == made[4:]
    assert made[0] == variables.get("MLFLOW_EXPERIMENT_NAME", "project")
    assert made[3]["nested"] is True
    assert made[3]["tags"] == {"team": "them" if variables else "us"}
    assert made[3]["run_id"] == ("run 1" if variables else "run 0")


def run_mlflow(folder: str) -> dict[str, Any]:
    import mlflow
    from matplotlib.figure import Figure

    accelerator = train("mlflow", folder, run_name="first", tags={"team": "us"})
    accelerator.log({"text": "left out"}, step=1)
    tracker = accelerator.get_tracker("mlflow")
    tracker.store_init_configuration({"long": "x" * 7000, **{f"p{i}": i for i in range(150)}})
    folders = Path(folder, "one"), Path(folder, "two")
    for each in folders:
        each.mkdir()
        (each / "text.txt").write_text("hello")
    tracker.log_artifact(str(folders[0] / "text.txt"))
    tracker.log_artifacts(str(folders[1]), "below")
    tracker.log_figure(Figure(), "figure.png")
    tracker.log_images({"x": [np.zeros((4, 4, 3), dtype=np.uint8)] * 2}, step=2)
    run = accelerator.get_tracker("mlflow", unwrap=True)
    kept = Path(mlflow.artifacts.download_artifacts(artifact_uri=run.info.artifact_uri))
    pictures = sorted(path.parent.name for path in kept.rglob("*.png"))
    accelerator.end_training()
    found = mlflow.get_run(run.info.run_id)
    experiment = mlflow.get_experiment(run.info.experiment_id).name
    again = Accelerator(cpu=True, log_with="mlflow")
    again.init_trackers("project")
    same = again.get_tracker("mlflow", unwrap=True).info.experiment_id == run.info.experiment_id
    again.end_training()
    data = found.data
    return {
        "metrics": data.metrics,
        "lr": data.params["lr"],
        "num_params": len(data.params),
        "tag": data.tags["team"],
        "ended": found.info.status,
        "experiment": experiment,
        "same": same,
        "files": sorted(str(path.relative_to(kept)) for path in kept.rglob("*.txt")),
        "pictures": pictures,
    }


def test_mlflow_writes_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    (found,) = run_ranks(in_environment, 1, "run_mlflow", str(tmp_path), {
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/runs",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    })  # fmt: skip
    assert found == {
        "metrics": {"loss": 0.25, "eval/f1": 0.25},
        "lr": "0.1",
        "num_params": 4 + 150,
        "tag": "us",
        "ended": "FINISHED",
        "experiment": "project",
        "same": True,
        "files": ["below/text.txt", "text.txt"],
        "pictures": ["artifacts", "images", "images"],
    }


def run_wandb(folder: str) -> dict[str, Any]:
    accelerator = train("wandb", folder, dir=folder, mode="offline")
    run = accelerator.get_tracker("wandb", unwrap=True)
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"x": [np.zeros((4, 4, 3), dtype=np.uint8)]}, step=2)
    tracker.log_table("table", columns=["a"], data=[[1]], step=2)
    config = dict(run.config)
    summary = {"loss": run.summary["loss"], "eval": run.summary["eval"]["f1"]}
    accelerator.end_training()
    return {"config": config, "summary": summary, "project": run.project}


def test_wandb_runs_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (found,) = run_ranks(
        in_environment, 1, "run_wandb", str(tmp_path), {"WANDB_SILENT": "true"}, timeout=100
    )
    assert found["summary"] == {"loss": 0.25, "eval": 0.25}
    assert found["config"]["nested"] == {"layers": [1, 2]}
    assert found["project"] == "project"
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def in_environment(name: str, folder: str, variables: dict[str, str]) -> Any:
    import os

    os.environ.update(variables)
    os.chdir(folder)
    return globals()[name](folder)


# ------------------------------------------------------------------ stand-ins by their signatures


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    spec = SimpleNamespace(origin=f"{name}.py")
    module = SimpleNamespace(__spec__=spec, **members)
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]


def test_every_library_says_how_it_is_installed() -> None:
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        assert kind.name == name
        assert kind.package.startswith(kind.module)  # type: ignore[attr-defined]


def test_the_object_of_a_library_has_the_name_that_accelerate_has_for_it(tmp_path: Path) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS as PEERS

    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        folder = [tmp_path] if kind.requires_logging_directory else []
        made: Any = kind("project", *folder)  # type: ignore[call-arg, arg-type]
        made._run = object()
        # All that it does is to give the attribute.
        (attribute,) = PEERS[name].tracker.fget.__code__.co_names
        assert getattr(made, attribute) is made.tracker is made._run
