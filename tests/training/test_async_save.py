"""``save_state(async_save=True)``: what was there at the call is written while training goes on."""

import gc
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, NotebookAccelError, WorkerError, notebook_launcher
from notebook_accel.training import files
from tests.training.test_checkpoint import FILES, Counter, setup, state_of, step
from tests.waiting import eventually


@pytest.fixture
def held_back(tmp_path, monkeypatch):
    """Whoever writes in the background waits until this file is there."""
    gate = tmp_path / "gate"
    plain = files.write_prepared

    def write(*args):
        eventually(gate.exists, what="the test opens the gate")
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


def test_no_copy_outlives_its_save(held_back, tmp_path):
    accelerator = Accelerator(cpu=True)
    weight = accelerator.prepare(nn.Linear(123, 456, bias=False)).weight
    own = weight.untyped_storage()

    # Not the process's memory: the C library keeps what is free in steps of its own.
    def copies():
        storages = [each for each in gc.get_objects() if type(each) is torch.UntypedStorage]
        same = [each for each in storages if each.nbytes() == own.nbytes()]
        return [each for each in same if each.data_ptr() != own.data_ptr()]

    gc.disable()  # nothing may wait for the collector, which comes late where little is made
    try:
        accelerator.save_state(tmp_path / "state", async_save=True)
        assert copies()
        held_back.touch()
        accelerator.wait_for_checkpoint()
        eventually(lambda: not copies(), what="the copy is gone")
    finally:
        gc.enable()


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


# It imports torch anew.
@pytest.mark.timeout(300)
def test_a_script_ends_once_its_checkpoint_is_there(tmp_path):
    script = """
        import sys, torch
        from notebook_accel import Accelerator
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(500, 500))
        accelerator.save_state(sys.argv[1], async_save=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "state")]
    subprocess.run(command, check=True, timeout=280)
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
