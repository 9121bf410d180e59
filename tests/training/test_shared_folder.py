"""Two runs that save into one folder at the same time: each checkpoint is whole, and all stay."""

import os
import time
from pathlib import Path

import pytest
from torch import nn

from notebook_accel import Accelerator, ProjectConfiguration, RunStopped, notebook_launcher
from notebook_accel.training.checkpoint.start import find_damage
from tests.waiting import eventually

NUM_SAVES = 12


def _meet(folder, name):
    """Wait for the other run, so that both save at the same time."""
    (folder / name).touch()
    eventually(lambda: len(list(folder.glob("ready_*"))) == 2, what="both have saved once")


def _save_all(root, name, way):
    folder = Path(root)
    project = ProjectConfiguration(f"{root}/project", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    # Large enough for the saves of the two runs to overlap.
    model = accelerator.prepare(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    paths = []
    for number in range(NUM_SAVES):
        if number == 1:  # each has saved once
            if accelerator.is_main_process:
                _meet(folder, f"ready_{name}")
            accelerator.wait_for_everyone()
        if way == "save_model":
            accelerator.save_model(model, f"{root}/exported")
        elif way == "one folder":
            paths.append(accelerator.save_state(f"{root}/last"))
        else:
            paths.append(accelerator.save_state(async_save=way == "async"))
    accelerator.end_training()
    return paths


def _run_twice(root, way):
    runs = [
        notebook_launcher(
            _save_all, (str(root), name, way), num_processes=2, view="none", block=False
        )
        for name in "ab"
    ]
    return [run.wait() for run in runs]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_numbered_checkpoints_of_two_runs(way, tmp_path):
    runs = _run_twice(tmp_path, way)
    for run in runs:
        assert run[0] == run[1], "the ranks of a run agree"
    paths = [path for run in runs for path in run[0]]
    folder = tmp_path / "project" / "checkpoints"
    assert sorted(os.listdir(folder)) == sorted(f"checkpoint_{n}" for n in range(2 * NUM_SAVES))
    assert sorted(paths) == sorted(str(path) for path in folder.iterdir()), "no number came twice"
    for path in folder.iterdir():
        assert find_damage(path) is None
        assert {"model.safetensors", "random_states_1.pkl"} <= set(os.listdir(path))


@pytest.mark.parametrize("way", ["one folder", "save_model"])
def test_one_folder_that_two_runs_replace(way, tmp_path):
    _run_twice(tmp_path, way)
    (folder,) = (path for path in tmp_path.iterdir() if not path.name.startswith("ready_"))
    assert find_damage(folder) is None
    expected = {"model.safetensors"}
    if way != "save_model":
        expected |= {"random_states_0.pkl", "random_states_1.pkl"}
    assert set(os.listdir(folder)) == expected


class Held:
    """Its state is asked for in the middle of a save."""

    def __init__(self, root):
        self.root = root

    def state_dict(self):
        (self.root / "saves").touch()
        time.sleep(3600)
        return {}

    def load_state_dict(self, state):
        pass


def _hang_in_save(root):
    project = ProjectConfiguration(root, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_for_checkpointing(Held(Path(root)))
    accelerator.save_state()


def test_the_checkpoint_of_a_dead_run_alone_is_removed(tmp_path):
    run = notebook_launcher(_hang_in_save, (str(tmp_path),), view="none", block=False)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(2, 2))
    eventually((tmp_path / "saves").exists, what="the run saves")
    path = accelerator.save_state()
    assert path == str(tmp_path / "checkpoints" / "checkpoint_1")
    (left,) = (name for name in os.listdir(tmp_path / "checkpoints") if name.startswith("."))
    assert os.listdir(tmp_path / "checkpoints" / left), "what the run has written stays"
    run.kill()
    with pytest.raises(RunStopped):
        run.wait(100)
    accelerator.save_state()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
