"""Each tracker by its library: the real one where it is installed and runs without a network.

For the others a stand-in has the signatures of the real library (versions named there), so that a
wrong argument is a TypeError here too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from notebook_accel.tracking import LOGGER_TYPE_TO_CLASS

from notebook_accel import Accelerator
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


@pytest.mark.long
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


@pytest.mark.long
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


def test_every_tracker_is_known_by_its_name() -> None:
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        assert kind.name == name
