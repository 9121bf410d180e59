"""Each tracker by its library: the real one where it is installed and runs without a network.

For the others a stand-in has the signatures of the real library (versions named there), so that a
wrong argument is a TypeError here too.
"""

from __future__ import annotations

import json
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


def run_trackio(folder: str) -> list[Any]:
    from trackio.sqlite_storage import SQLiteStorage

    accelerator = train("trackio", folder, name="first", embed=False)
    accelerator.end_training()
    logged = SQLiteStorage.get_logs("project", "first")
    return [(row["step"], row["loss"]) for row in logged]


def test_trackio_writes_to_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    (found,) = run_ranks(
        in_environment, 1, "run_trackio", str(tmp_path), {"TRACKIO_DIR": str(tmp_path)}
    )
    assert found == [(0, 0.5), (1, 0.25)]


def run_dvclive(folder: str) -> Any:
    accelerator = train("dvclive", folder, dir=f"{folder}/live", save_dvc_exp=False)
    accelerator.get_tracker("dvclive").log_images({"x": [np.zeros((4, 4, 3), dtype=np.uint8)]})
    accelerator.end_training()
    return json.loads(Path(folder, "live", "metrics.json").read_text())


def test_dvclive_writes_to_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("dvclive")
    (found,) = run_ranks(in_environment, 1, "run_dvclive", str(tmp_path), {"DVC_NO_ANALYTICS": "1"})
    assert (found["loss"], found["eval"]) == (0.25, {"f1": 0.25})
    written = {str(path.relative_to(tmp_path / "live")) for path in tmp_path.glob("live/**/*")}
    assert {"params.yaml", "plots/metrics/eval/f1.tsv", "plots/images/x/0.png"} <= written


def run_swanlab(folder: str) -> Any:
    accelerator = train("swanlab", folder, mode="offline", logdir=f"{folder}/swan")
    accelerator.get_tracker("swanlab").log_images({"x": [np.zeros((4, 4, 3), dtype=np.uint8)]})
    config = dict(accelerator.get_tracker("swanlab", unwrap=True).config)
    accelerator.end_training()
    return config


def test_swanlab_writes_to_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    home = {"SWANLAB_SAVE_DIR": str(tmp_path / "home")}
    (config,) = run_ranks(in_environment, 1, "run_swanlab", str(tmp_path), home)
    assert config["nested"] == {"layers": [1, 2]}
    assert [path for path in tmp_path.glob("swan/**/*") if path.is_file()]


def in_environment(name: str, folder: str, variables: dict[str, str]) -> Any:
    import os

    os.environ.update(variables)
    os.chdir(folder)
    return globals()[name](folder)


# ------------------------------------------------------------------ stand-ins by their signatures


class Calls(list[Any]):
    def __call__(self, name: str, **arguments: Any) -> None:
        self.append((name, {k: v for k, v in arguments.items() if v is not None}))


@pytest.fixture
def calls() -> Calls:
    return Calls()


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    spec = SimpleNamespace(origin=f"{name}.py")
    module = SimpleNamespace(__spec__=spec, **members)
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]


def names(calls: Calls) -> list[str]:
    return [name for name, _ in calls]


def test_comet(monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path) -> None:
    class Experiment:  # comet_ml 3.58
        def log_parameters(self, parameters: Any, prefix: Any = None, step: Any = None) -> None:
            calls("log_parameters", parameters=parameters)

        def set_step(self, step: Any) -> None:
            calls("set_step", step=step)

        def log_metric(self, name: Any, value: Any, step: Any = None, epoch: Any = None) -> None:
            calls("log_metric", key=name, value=value, step=step)

        def log_other(self, key: Any, value: Any) -> None:
            calls("log_other", key=key, value=value)

        def log_image(self, image_data: Any, name: Any = None, *, step: Any = None) -> None:
            calls("log_image", key=name, step=step)

        def end(self) -> None:
            calls("end")

    def start(*, project_name: Any = None, online: Any = None) -> Experiment:
        calls("start", project_name=project_name, online=online)
        return Experiment()

    stand_in(monkeypatch, "comet_ml", start=start)
    accelerator = train("comet_ml", str(tmp_path), online=False)
    accelerator.log({"note": "hello"})
    accelerator.get_tracker("comet_ml").log_images({"x": [1, 2]}, step=4)
    accelerator.end_training()
    assert calls[0] == ("start", {"project_name": "project", "online": False})
    assert calls[1] == ("log_parameters", {"parameters": CONFIG})
    assert ("log_metric", {"key": "eval/f1", "value": 0.25, "step": 1}) in calls
    assert ("log_other", {"key": "note", "value": "hello"}) in calls
    assert names(calls)[-3:] == ["log_image", "log_image", "end"]


def test_aim(monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path) -> None:
    class Run:  # aim 3.29
        name = ""

        def __init__(self, run_hash: Any = None, *, repo: Any = None, experiment: Any = None):
            calls("Run", repo=repo, experiment=experiment)

        def __setitem__(self, key: str, value: Any) -> None:
            calls("set", key=key, value=value)

        def track(self, value: Any, name: Any = None, step: Any = None, epoch: Any = None) -> None:
            calls("track", value=value, key=name, step=step)

        def close(self) -> None:
            calls("close")

    def image(image: Any, caption: str = "", format: Any = None, quality: int = 90) -> Any:  # noqa: A002
        return ("image", image, caption, quality)

    stand_in(monkeypatch, "aim", Run=Run, Image=image)
    accelerator = train("aim", str(tmp_path), experiment="first")
    tracker = accelerator.get_tracker("aim")
    assert tracker.tracker.name == "project"
    tracker.log_images({"x": (1, "one")}, step=3, kwargs={"aim_image": {"quality": 50}})
    accelerator.end_training()
    assert calls[0] == ("Run", {"repo": str(tmp_path), "experiment": "first"})
    assert calls[1] == ("set", {"key": "hparams", "value": CONFIG})
    assert ("track", {"value": 0.25, "key": "eval/f1", "step": 1}) in calls
    assert calls[-2] == ("track", {"value": ("image", 1, "one", 50), "key": "x", "step": 3})
    assert calls[-1] == ("close", {})


def clearml_task(calls: Calls, current: Any) -> Any:
    class Logger:  # clearml 2.1
        def report_scalar(self, title: str, series: str, value: float, iteration: int) -> None:
            calls("scalar", title=title, series=series, value=value, iteration=iteration)

        def report_single_value(self, name: str, value: float) -> None:
            calls("single", key=name, value=value)

        def report_image(
            self, title: str, series: str, iteration: Any = None, *, image: Any = None
        ) -> None:
            calls("image", title=title, series=series, iteration=iteration, image=image)

        def report_table(
            self, title: str, series: str, iteration: Any = None, table_plot: Any = None
        ) -> None:
            calls("table", title=title, series=series, table=table_plot)

    class Task:
        @classmethod
        def current_task(cls) -> Any:
            return Task() if current else None

        @classmethod
        def init(cls, project_name: Any = None, task_name: Any = None, tags: Any = None) -> Any:
            calls("init", project_name=project_name, task_name=task_name, tags=tags)
            return Task()

        def connect_configuration(self, configuration: Any, name: Any = None) -> None:
            calls("configuration", values=configuration)

        def get_logger(self) -> Logger:
            return Logger()

        def close(self) -> None:
            calls("close")

    return Task


def test_clearml(monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARML_TASK", "my task")
    monkeypatch.setenv("CLEARML_PROJECT", "my project")
    stand_in(monkeypatch, "clearml", Task=clearml_task(calls, None))
    accelerator = train("clearml", str(tmp_path), tags=["a"])
    accelerator.log({"eval_loss": 1.0}, step=3)
    accelerator.log({"accuracy": 0.5})
    tracker = accelerator.get_tracker("clearml")
    tracker.log_images({"test_x": ["image"]}, step=3)
    tracker.log_table("eval_rows", dataframe="frame")
    tracker.log_table("rows", columns=["a"], data=[[1]])
    with pytest.raises(ConfigError, match="neither data nor dataframe: pass columns="):
        tracker.log_table("rows")
    accelerator.end_training()
    init = {"project_name": "my project", "task_name": "my task", "tags": ["a"]}
    assert calls[:2] == [("init", init), ("configuration", {"values": CONFIG})]
    loss = {"title": "loss", "series": "eval", "value": 1.0, "iteration": 3}
    assert ("scalar", loss) in calls
    assert ("single", {"key": "accuracy", "value": 0.5}) in calls
    assert ("image", {"title": "x", "series": "test", "iteration": 3, "image": "image"}) in calls
    assert calls[-3] == ("table", {"title": "rows", "series": "eval", "table": "frame"})
    assert calls[-2] == ("table", {"title": "rows", "series": "train", "table": [["a"], [1]]})
    assert calls[-1] == ("close", {})


def test_a_clearml_task_of_the_user_stays_open(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path
) -> None:
    stand_in(monkeypatch, "clearml", Task=clearml_task(calls, "open"))
    train("clearml", str(tmp_path)).end_training()
    assert "close" not in names(calls)
    assert "init" not in names(calls)


def test_dvclive(monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path) -> None:
    told = Told()
    be(told, monkeypatch)

    class Live:  # dvclive 3.49
        step = 0

        def __init__(self, dir: str = "dvclive", resume: bool = False) -> None:  # noqa: A002
            calls("Live", dir=dir)

        def log_params(self, params: Any) -> None:
            calls("params", values=params)

        def log_metric(
            self, name: str, val: Any, timestamp: bool = False, plot: bool = True
        ) -> None:
            calls("metric", key=name, value=val, step=self.step, plot=plot)

        def log_image(self, name: str, val: Any) -> None:
            calls("image", key=name, value=val)

        def next_step(self) -> None:
            self.step += 1

        def end(self) -> None:
            calls("end")

    stand_in(monkeypatch, "dvclive", Live=Live)
    accelerator = train("dvclive", str(tmp_path), dir="here")
    accelerator.log({"x": [1]}, log_kwargs={"dvclive": {"plot": False}})
    accelerator.log({"y": "text"}, log_kwargs={"dvclive": {"plot": False}})
    accelerator.get_tracker("dvclive").log_images({"x": ["image"]}, step=5)
    accelerator.end_training()
    assert calls[:2] == [("Live", {"dir": "here"}), ("params", {"values": CONFIG})]
    assert ("metric", {"key": "eval/f1", "value": 0.25, "step": 1, "plot": True}) in calls
    assert ("metric", {"key": "y", "value": "text", "step": 3, "plot": False}) in calls
    assert calls[-2:] == [("image", {"key": "x/0.png", "value": "image"}), ("end", {})]
    assert "dvclive: 'x' is a list: not kept" in told.notices
    own = Live("of the user")
    own.step = 7
    before = len(calls)
    other = Accelerator(cpu=True, log_with="dvclive")
    other.init_trackers("project", init_kwargs={"dvclive": {"live": own}})
    assert other.get_tracker("dvclive", unwrap=True) is own
    other.log({"loss": 1})
    assert calls[before:] == [("metric", {"key": "loss", "value": 1.0, "step": 7, "plot": True})]


def test_swanlab(monkeypatch: pytest.MonkeyPatch, calls: Calls, tmp_path: Path) -> None:
    class Run:  # swanlab 0.10
        def log(self, data: Any, step: Any = None) -> None:
            calls("log", data=data, step=step)

        def finish(self) -> None:
            calls("finish")

    def init(*, project: Any = None, mode: Any = None) -> Run:
        calls("init", project=project, mode=mode)
        return Run()

    config: dict[str, Any] = {}
    stand_in(monkeypatch, "swanlab", init=init, config=config, Image=lambda image: ("image", image))
    accelerator = train("swanlab", str(tmp_path), mode="offline")
    accelerator.get_tracker("swanlab").log_images({"x": [1]}, step=3)
    accelerator.end_training()
    assert calls[0] == ("init", {"project": "project", "mode": "offline"})
    assert config == CONFIG
    assert ("log", {"data": {"loss": 0.25, "eval": {"f1": 0.25}}, "step": 1}) in calls
    assert calls[-2:] == [("log", {"data": {"x": [("image", 1)]}, "step": 3}), ("finish", {})]


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
