"""``save_state(async_save=True)``: what was there at the call is written while training goes on."""

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from notebook_accel import (
    Accelerator,
    NotebookAccelError,
    ProjectConfiguration,
    WorkerError,
    notebook_launcher,
)
from notebook_accel.training import files
from tests.training import resuming
from tests.training.harness import run_ranks, runs_here, skip_unless_it_runs
from tests.training.test_checkpoint import FILES, Counter, setup, state_of, step
from tests.waiting import eventually


@pytest.fixture
def held_back(tmp_path, monkeypatch):
    """Whoever writes in the background waits until this file is there."""
    gate = tmp_path / "gate"
    plain = files.write_prepared

    def write(*args):
        eventually(gate.exists, within=20, what="the test opens the gate")
        return plain(*args)

    monkeypatch.setattr(files, "write_prepared", write)
    return gate


def test_what_is_written_is_what_was_there_at_the_call(held_back, tmp_path):
    parts = setup()
    step(*parts)
    folder = tmp_path / "state"
    expected = state_of(*parts)
    assert parts[0].save_state(folder, async_save=True) == str(folder)
    assert not folder.exists(), "published before it is whole"
    step(*parts)
    nn.init.zeros_(parts[1].embed.weight)
    held_back.touch()
    parts[0].wait_for_checkpoint()
    assert set(os.listdir(folder)) == FILES
    assert sorted(os.listdir(tmp_path)) == ["gate", "state"], "nothing of the writing is left"
    resumed = setup()
    resumed[0].load_state(folder)
    assert state_of(*resumed) == expected
    assert resumed[1].head.weight is resumed[1].embed.weight


def test_a_save_waits_for_the_one_before_and_numbers_go_on(tmp_path):
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    parts = setup(project)
    names = []
    for number in range(4):
        step(*parts)
        names.append(Path(parts[0].save_state(async_save=True)).name)
        there = sorted(os.listdir(tmp_path / "checkpoints"))
        whole = [name for name in there if not name.startswith(".")]
        assert whole[-2:] in (
            [f"checkpoint_{n}" for n in range(number + back)][-2:] for back in (0, 1)
        )
    parts[0].end_training()
    assert names == [f"checkpoint_{number}" for number in range(4)]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == names[-2:]


class Unsafe(Counter):
    def state_dict(self):
        return {"count": nn.Linear(1, 1)}


def test_what_could_not_be_written_is_told_at_once_and_raised_next(tmp_path, monkeypatch):
    # No room for temporary files is needed for it.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    folder = tmp_path / "state"
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(folder)
    accelerator.register_for_checkpointing(Unsafe())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for wait in (
            lambda: accelerator.save_state(tmp_path / "next"),
            accelerator.wait_for_checkpoint,
            lambda: accelerator.load_state(folder),
            lambda: accelerator.resume_or_start(tmp_path),
        ):
            accelerator.save_state(folder, async_save=True)
            with pytest.raises(NotebookAccelError, match=r"state could not be written.*Linear"):
                wait()
        accelerator.save_state(folder, async_save=True)
        with pytest.raises(NotebookAccelError, match="Earlier checkpoints are as they were"):
            accelerator.end_training()
    accelerator.wait_for_checkpoint()
    assert os.listdir(tmp_path) == ["state"], "the one before is there, and nothing else"


def test_tensors_that_processes_share_are_copied(held_back, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2).share_memory()
    model = accelerator.prepare(model)
    expected = model.weight.detach().clone()
    for _ in range(2):
        accelerator.save_state(tmp_path / "state", async_save=True)
        nn.init.zeros_(model.weight)
        held_back.touch()
        accelerator.load_state(tmp_path / "state")
        assert torch.equal(model.weight, expected)


def test_a_script_ends_once_its_checkpoint_is_there(tmp_path):
    script = """
        import sys, torch
        from notebook_accel import Accelerator
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(500, 500))
        accelerator.save_state(sys.argv[1], async_save=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "state")]
    subprocess.run(command, check=True, timeout=60)
    assert "model.safetensors" in os.listdir(tmp_path / "state")


def train(folder, fails):
    """A launched function that leaves the end of its save to the launcher."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(300, 300))
    if fails and accelerator.is_main_process:
        accelerator.register_for_checkpointing(Unsafe())
    accelerator.save_state(folder, async_save=True)
    return float(model.module.weight.detach().sum())


def test_a_launched_function_has_ended_once_its_checkpoint_is_there(tmp_path):
    run = notebook_launcher(train, (str(tmp_path / "a"), False), num_processes=2, view="none")
    assert len(set(run.results)) == 1
    assert "random_states_1.pkl" in os.listdir(tmp_path / "a")
    with pytest.raises(WorkerError, match=r"b could not be written.*Linear"):
        notebook_launcher(train, (str(tmp_path / "b"), True), num_processes=2, view="none")
    # A rank that is ended since another has failed may leave a hidden folder, until the next save.
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == ["a"]
    notebook_launcher(train, (str(tmp_path / "b"), False), num_processes=2, view="none")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def train_all(folder, is_async, stop):
    """Save after each step; the first three alone where nobody goes on from there."""
    return {
        mesh: resuming.train(
            f"{folder}/{mesh}",
            mesh,
            samples=8,
            saves=lambda number: is_async or number <= 3,
            in_background=is_async,
            stop=stop,
        )["losses"]
        for mesh in filter(runs_here, SPREAD)
    }


SPREAD = (None, "fsdp, blocks", "tensor", "1F1B")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Where ranks have saved, and what each saw: of a training that saves as it goes; of one that
    saves in the background and stops; and of one that goes on from there."""
    root = tmp_path_factory.mktemp("spread")
    seen = [
        run_ranks(train_all, 2, str(root / name), is_async, stop, timeout=120)
        for name, is_async, stop in (("whole", False, 99), ("parts", True, 3), ("parts", True, 99))
    ]
    return root, seen


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mesh", SPREAD)
def test_ranks_write_while_they_train(mesh, written):
    skip_unless_it_runs(mesh)
    root, seen = written
    for whole, first, rest in zip(*seen, strict=True):
        one, before, after = whole[mesh], first[mesh], rest[mesh]
        assert {**before, **after} == one
        assert len(after) == 8 - 2, "the window that was open is read again"
    folders = [root / name / str(mesh) / "checkpoint_2" for name in ("whole", "parts")]
    names = [sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) for folder in folders]
    assert names[0] == names[1]
