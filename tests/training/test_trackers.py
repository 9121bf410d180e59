"""``log_with``: which trackers it comes to, and when each of their methods is called."""

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from notebook_accel.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    WandBTracker,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
)
from notebook_accel.utils import LoggerType

from notebook_accel import Accelerator, ConfigError, ProjectConfiguration
from tests.training.harness import on_ranks
from tests.training.single import Told, be


class Recorder(GeneralTracker):
    """A user's own tracker, which writes down its calls."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, run_name="made", **kwargs):
        super().__init__()
        self.calls = [("init", run_name, kwargs)]

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append("start")

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.calls.append((values, step, kwargs))

    def finish(self):
        self.calls.append("finish")


class Folder(Recorder):
    name = "folder"
    requires_logging_directory = True

    def __init__(self, run_name, logging_dir):
        super().__init__(run_name, logging_dir=logging_dir)


def test_an_object_is_started_fed_and_finished_beside_the_live_tracker(monkeypatch):
    told = Told()
    be(told, monkeypatch)
    own = Recorder()
    accelerator = Accelerator(cpu=True, log_with=own)
    accelerator.init_trackers("project", config={"lr": 1})
    accelerator.log({"loss": 0.5}, step=2, log_kwargs={"recorder": {"flag": True}})
    assert [tracker.name for tracker in accelerator.trackers] == ["recorder"]
    assert accelerator.get_tracker("recorder") is own
    assert accelerator.get_tracker("recorder", unwrap=True) is own.calls
    accelerator.end_training()
    accelerator.end_training()
    logged = ({"loss": 0.5}, 2, {"flag": True})
    expected = [("init", "made", {}), "start", ("config", {"lr": 1}), logged, "finish"]
    assert own.calls == expected
    assert told.metrics == [({"loss": 0.5}, 2)]
    accelerator.trackers = [own]
    accelerator.log({"loss": 0.25})
    assert own.calls[-1] == ({"loss": 0.25}, None, {})
    assert told.metrics[1:] == [({"loss": 0.25}, None)]


def test_a_class_is_made_with_the_project_its_folder_and_its_arguments(tmp_path):
    accelerator = Accelerator(cpu=True, log_with=[Recorder, Folder], project_dir=tmp_path)
    accelerator.init_trackers("project", init_kwargs={"recorder": {"entity": "me"}})
    assert accelerator.get_tracker("recorder").calls[0] == ("init", "project", {"entity": "me"})
    assert accelerator.get_tracker("folder").calls[0][2] == {"logging_dir": str(tmp_path)}


def test_a_registered_class_is_found_by_its_name(monkeypatch):
    # The test's end takes the entry away again.
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    del LOGGER_TYPE_TO_CLASS["recorder"]
    register_tracker_class(Recorder)
    accelerator = Accelerator(cpu=True, log_with=["recorder", Recorder, "recorder"])
    accelerator.init_trackers("project")
    assert [tracker.name for tracker in accelerator.trackers] == ["recorder"]
    with pytest.warns(UserWarning, match="Recorder takes the place of the tracker 'recorder'"):
        register_tracker_class(Recorder)


def test_what_is_no_tracker_is_refused():
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    class NoFolder(GeneralTracker):
        name = "no_folder"

    with pytest.raises(ConfigError, match=r"log_with='wandbb'.*no such tracker.*'all', 'mlflow'"):
        Accelerator(cpu=True, log_with="wandbb")
    with pytest.raises(ConfigError, match=r"expected a class derived from .*GeneralTracker"):
        register_tracker_class(Accelerator)
    with pytest.raises(ConfigError, match="Nameless lacks name: set it in the class"):
        register_tracker_class(Nameless)
    with pytest.raises(ConfigError, match="NoFolder lacks requires_logging_directory"):
        Accelerator(cpu=True, log_with=NoFolder)
    with pytest.raises(NotImplementedError, match=r"NoFolder lacks requires_.*, tracker"):
        NoFolder()
    GeneralTracker(_blank=True).log({"loss": 1})
    with pytest.raises(ConfigError, match=r"'folder'\): it writes files and has no folder: pass"):
        Accelerator(cpu=True, log_with=Folder)
    config = ProjectConfiguration(logging_dir="logs")
    Accelerator(cpu=True, log_with=Folder, project_config=config)


def test_a_library_that_is_not_installed_is_named(monkeypatch, tmp_path):
    # A folder of that name, as the library leaves it where it ran, is no library.
    (tmp_path / "wandb_absent").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(WandBTracker, "module", "wandb_absent")
    message = r"log_with='wandb'\): wandb_absent is not installed: run pip install \"wandb_absent\""
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, log_with=LoggerType.WANDB)
    assert LoggerType.WANDB not in get_available_trackers()


def test_all_is_what_is_installed_and_what_was_made(monkeypatch, tmp_path):
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        monkeypatch.setattr(kind, "module", "json" if name == "wandb" else "absent_library")
    own = Recorder()
    assert get_available_trackers() == [LoggerType.WANDB]
    assert Accelerator(cpu=True, log_with=["all", own]).log_with == [own, WandBTracker]
    assert Accelerator(cpu=True, log_with="all").log_with == [WandBTracker]


def test_log_before_init_trackers_is_named(monkeypatch):
    told = Told()
    be(told, monkeypatch)
    accelerator = Accelerator(cpu=True, log_with=Recorder)
    accelerator.log({"loss": 1})
    accelerator.log({"loss": 2})
    (notice,) = told.notices
    assert notice.startswith("log() before init_trackers(): the trackers of log_with get nothing")
    assert len(told.metrics) == 2


def test_a_tracker_that_fails_to_finish_keeps_no_other_from_it():
    class Failing(Recorder):
        name = "failing"

        def finish(self):
            raise OSError("no network")

    own, failing = Recorder(), Failing()
    accelerator = Accelerator(cpu=True, log_with=[own, failing])
    accelerator.init_trackers("project")
    with pytest.raises(OSError, match="no network"):
        accelerator.end_training()
    assert own.calls[-1] == "finish"


class PerRank(Recorder):
    name = "per_rank"

    def __init__(self, everywhere):
        super().__init__()
        self.main_process_only = not everywhere

    @on_main_process
    def mark(self):
        return "marked"


@on_ranks(2)
def test_the_main_process_alone_tracks():
    own = Recorder()
    accelerator = Accelerator(cpu=True, log_with=own)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"loss": 1.0}, step=1)
    got = accelerator.get_tracker("recorder")
    got.log_images({"x": []})
    accelerator.end_training()
    is_main = accelerator.is_main_process
    assert (len(own.calls), got.name) == ((5, "recorder") if is_main else (1, "blank"))
    assert PerRank(False).mark() == ("marked" if is_main else None)
    assert PerRank(True).mark() == "marked"
    # The notebook's too; another is blank there.
    tracker = accelerator.get_tracker("notebook" if is_main else "wandb")
    tracker.log({"loss": 1.0}, step=1)
    assert tracker.name == ("notebook" if is_main else "blank")


# The notebook's own tracker, and the blank one of ranks that do not track.


def test_the_live_tracker_shows_numbers(monkeypatch):
    told = Told()
    be(told, monkeypatch)
    accelerator = Accelerator(cpu=True)
    # Scripts draw their images for each of them by its name, and warn of a name unknown to them.
    assert accelerator.trackers == []
    live = accelerator.get_tracker("notebook")
    live.log({"loss": 0.5}, step=3)
    live.store_init_configuration({"lr": 1})
    live.finish()
    assert told.metrics == [({"loss": 0.5}, 3)]
    assert type(accelerator.get_tracker("notebook", unwrap=True)) is type(live)
    with pytest.raises(ConfigError, match=r"get_tracker\('wandb'\).*'notebook'"):
        accelerator.get_tracker("wandb")


# Each tracker by its library.


CONFIG = {"lr": 0.1, "name": "tiny", "nested": {"layers": [1, 2]}, "flag": True}


def train(name, folder, /, **init_kwargs):
    """What the tests let every tracker keep."""
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder)
    accelerator.init_trackers("project", CONFIG, init_kwargs={name: init_kwargs})
    for step in range(2):
        loss = torch.tensor(0.5, requires_grad=True) / (step + 1)
        accelerator.log({"loss": loss, "eval": {"f1": np.float32(0.25)}}, step=step)
    return accelerator


def test_tensorboard_writes_events_and_settings(tmp_path):
    events = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(events).EventAccumulator
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


@pytest.mark.long
@pytest.mark.skipif(not find_spec("mlflow"), reason="mlflow is not installed")
@on_ranks(1, timeout=100)
def test_mlflow_writes_to_a_folder(tmp_path):
    os.chdir(tmp_path)
    uri = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/runs", "MLFLOW_ALLOW_FILE_STORE": "true"}
    os.environ.update(uri)
    import mlflow
    from matplotlib.figure import Figure

    accelerator = train("mlflow", str(tmp_path), run_name="first", tags={"team": "us"})
    accelerator.log({"text": "left out"}, step=1)
    tracker = accelerator.get_tracker("mlflow")
    tracker.store_init_configuration({"long": "x" * 7000, **{f"p{i}": i for i in range(150)}})
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "text.txt").write_text("hello")
    tracker.log_artifact(str(one / "text.txt"))
    tracker.log_artifacts(str(two), "below")
    tracker.log_figure(Figure(), "figure.png")
    tracker.log_images({"x": [np.zeros((4, 4, 3), dtype=np.uint8)] * 2}, step=2)
    run = accelerator.get_tracker("mlflow", unwrap=True)
    kept = Path(mlflow.artifacts.download_artifacts(artifact_uri=run.info.artifact_uri))
    pictures = sorted(path.parent.name for path in kept.rglob("*.png"))
    assert pictures == ["artifacts", "images", "images"]
    texts = sorted(str(path.relative_to(kept)) for path in kept.rglob("*.txt"))
    assert texts == ["below/text.txt", "text.txt"]
    accelerator.end_training()
    found = mlflow.get_run(run.info.run_id)
    assert found.info.status == "FINISHED"
    assert found.data.metrics == {"loss": 0.25, "eval/f1": 0.25}
    assert (found.data.params["lr"], len(found.data.params)) == ("0.1", 4 + 150)
    assert found.data.tags["team"] == "us"
    assert mlflow.get_experiment(run.info.experiment_id).name == "project"
    again = Accelerator(cpu=True, log_with="mlflow")
    again.init_trackers("project")
    experiment = again.get_tracker("mlflow", unwrap=True).info.experiment_id
    assert experiment == run.info.experiment_id
    again.end_training()


@pytest.mark.long
@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
@on_ranks(1, timeout=100)
def test_wandb_runs_offline(tmp_path):
    os.chdir(tmp_path)
    os.environ["WANDB_SILENT"] = "true"
    accelerator = train("wandb", str(tmp_path), dir=str(tmp_path), mode="offline")
    run = accelerator.get_tracker("wandb", unwrap=True)
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"x": [np.zeros((4, 4, 3), dtype=np.uint8)]}, step=2)
    tracker.log_table("table", columns=["a"], data=[[1]], step=2)
    assert run.config["nested"] == {"layers": [1, 2]}
    assert (run.summary["loss"], run.summary["eval"]["f1"]) == (0.25, 0.25)
    assert run.project == "project"
    accelerator.end_training()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_every_tracker_is_known_by_its_name():
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        assert kind.name == name
