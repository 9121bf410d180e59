"""``resume_or_start``: one line that begins anew, or goes on from the newest checkpoint."""

import functools
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, NotebookAccelError, ProjectConfiguration
from notebook_accel.training.collectives import this_rank
from notebook_accel.training.processes.topology import barrier
from tests.training import resuming
from tests.training.harness import on_ranks, run_ranks, warnings_about
from tests.training.meshes import accelerator_for, data, make

EPOCHS, SAMPLES = 3, 10


def train(folder, mesh=None, stop=0, saves=True):
    found = resuming.train(
        folder, mesh, samples=SAMPLES, epochs=EPOCHS, saves=lambda _: saves, stop=stop
    )
    start = found["start"]
    began = [start.epoch, start.batch, start.step, start.samples]
    return {**found, "start": began, "folder": start.folder}


@functools.cache
def losses_of_whole():
    """Of the training that is never stopped, and that saves nothing."""
    with tempfile.TemporaryDirectory() as folder:
        return train(folder, saves=False)["losses"]


def joined(parts):
    return {key: loss for part in parts for key, loss in part["losses"].items()}


def test_the_same_line_begins_and_goes_on(tmp_path):
    parts = [train(tmp_path / "parts", stop=stop) for stop in (7, 4, 13, 0)]
    assert parts[0]["folder"] is None
    assert parts[0]["saved"][:2] == ["checkpoint_0", "checkpoint_1"]
    # In the middle of a window, which is read again, at the end of an epoch, and in the middle of a
    # window again.
    starts = [part["start"] for part in parts]
    assert starts == [[0, 0, 0, 0], [0, 6, 3, 6], [1, 0, 5, 10], [2, 2, 11, 22]]
    folders = [Path(part["folder"]).name for part in parts[1:]]
    assert folders == ["checkpoint_6", "checkpoint_10", "checkpoint_23"]
    assert joined(parts) == losses_of_whole()
    done = train(tmp_path / "parts")
    assert (done["start"], done["losses"]) == ([3, 0, 15, 30], {})


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


DAMAGE = {
    "model.safetensors": cut,
    "optimizer.bin": cut,
    "scheduler.bin": lambda path: path.write_bytes(b""),
    "random_states_0.pkl": lambda path: path.write_bytes(bytes(range(200))),
    "loader.bin": cut,
}


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_a_broken_one_is_named_and_passed_over(name, tmp_path):
    folder = tmp_path / "run"
    train(folder, stop=4)
    DAMAGE[name](folder / "checkpoint_3" / name)
    (folder / "checkpoint_2" / "optimizer.bin").unlink()
    shutil.copytree(folder / "checkpoint_1", folder / ".checkpoint_4.01234567.partial")
    (folder / "checkpoint_5").mkdir()
    with warnings_about("passes over") as lines:
        part = train(folder, stop=4)
    assert Path(part["folder"]).name == "checkpoint_1"
    assert [line.partition(": ")[0][-12:] for line in lines] == ["checkpoint_3", "checkpoint_2"]
    assert name in lines[0]
    assert f"optimizer.bin is not in {folder / 'checkpoint_2'}; it holds" in lines[1]
    assert part["losses"].items() <= losses_of_whole().items()
    assert part["saved"][0] == "checkpoint_6", "no number is given twice"


def test_it_begins_anew_where_every_one_is_broken(tmp_path):
    train(tmp_path / "run", stop=2)
    for number in range(2):
        cut(tmp_path / "run" / f"checkpoint_{number}" / "model.safetensors")
    with warnings_about("passes over") as lines:
        part = train(tmp_path / "run", stop=4)
    first = dict(itertools.islice(losses_of_whole().items(), 4))
    assert (part["folder"], part["losses"], len(lines)) == (None, first, 2)
    assert part["saved"][0] == "checkpoint_2"


def test_what_is_found_broken_as_it_is_loaded_is_passed_over_too(tmp_path):
    train(tmp_path / "run", stop=3)

    def spoil(number):
        path = tmp_path / "run" / f"checkpoint_{number}" / "random_states_0.pkl"
        states = torch.load(path)
        torch.save({**states, "numpy_random_seed": None}, path)

    spoil(2)
    with warnings_about("passes over") as lines:
        part = train(tmp_path / "run", stop=1)
    assert Path(part["folder"]).name == "checkpoint_1"
    assert part["losses"].items() <= losses_of_whole().items()
    assert len(lines) == 1
    assert "random_states_0.pkl could not be read" in lines[0]
    shutil.rmtree(tmp_path / "run" / "checkpoint_1")
    for number in (0, 3):
        spoil(number)
    with (
        pytest.warns(match="passes over"),
        pytest.raises(NotebookAccelError, match="Move them away"),
    ):
        train(tmp_path / "run")


def test_another_model_is_an_error_and_no_new_beginning(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.resume_or_start(tmp_path)
    accelerator.save_state()
    other = Accelerator(cpu=True)
    other.prepare(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.resume_or_start(tmp_path)


def saves(where, **settings):
    """Save checkpoints whose one weight counts up."""
    accelerator = Accelerator(cpu=True, **settings)
    model = accelerator.prepare(nn.Linear(1, 1))
    for number, one in enumerate(where):
        nn.init.constant_(model.weight, number)
        accelerator.save_state(one)


def loaded(folder, **settings):
    accelerator = Accelerator(cpu=True, **settings)
    model = accelerator.prepare(nn.Linear(1, 1))
    start = accelerator.resume_or_start(folder)
    next_one = Path(accelerator.save_state()).relative_to(folder)
    return model.weight.item(), start.folder, str(next_one)


def test_checkpoints_are_found_wherever_a_script_put_them(tmp_path):
    def project(name):
        configuration = ProjectConfiguration(
            str(tmp_path / name), automatic_checkpoint_naming=True, total_limit=2
        )
        return {"project_config": configuration}

    a = tmp_path / "a"
    saves([a / "z", a / "best", a / "m"])
    for safe in (True, False):  # weights alone, newer than the checkpoints
        Accelerator(cpu=True).save_model(nn.Linear(1, 1), a / f"{safe}", safe_serialization=safe)
    with warnings_about("passes over") as lines:
        found = loaded(a)
    assert not lines
    assert found == (2.0, str(a / "m"), "checkpoint_0")

    b = tmp_path / "b"
    saves([None] * 3, **project("b"))
    kept = str(b / "checkpoints/checkpoint_2")
    assert loaded(b, **project("b")) == (2.0, kept, "checkpoints/checkpoint_3")
    assert sorted(os.listdir(b / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]
    # Without the settings, where they are nevertheless; by the folder that holds them, too.
    assert loaded(b)[2] == "checkpoints/checkpoint_4"
    assert loaded(b / "checkpoints")[2] == "checkpoint_5"
    assert loaded(tmp_path / "new", **project("new"))[1:] == (None, "checkpoints/checkpoint_0")

    c = tmp_path / "c"
    saves([c, c])
    assert loaded(c)[:2] == (1.0, str(c))
    # Numbers count, whatever the clock said.
    d = tmp_path / "d"
    saves([d / "checkpoint_9", d / "checkpoint_10"])
    path = d / "checkpoint_10" / "random_states_0.pkl"
    states = torch.load(path)
    states["training"]["written"] = 5.0
    torch.save(states, path)
    assert loaded(d) == (1.0, str(d / "checkpoint_10"), "checkpoint_11")


def test_a_position_that_was_loaded_and_not_yet_used_is_saved_again(tmp_path):
    train(tmp_path / "run", stop=5)
    accelerator = accelerator_for(None, gradient_accumulation_steps=2)
    model, optimizer = make({})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(data(SAMPLES), batch_size=1, shuffle=True)
    accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.resume_or_start(tmp_path / "run")
    accelerator.save_state()
    part = train(tmp_path / "run", stop=4)
    assert part["start"] == [0, 4, 2, 4]
    assert part["losses"].items() <= losses_of_whole().items()


@pytest.mark.parametrize("mesh", [None, "fsdp, blocks"])
@on_ranks(2)
def test_two_ranks_agree(mesh, tmp_path):
    whole = train(tmp_path / "whole", mesh, saves=False)["losses"]
    run = tmp_path / "run"
    train(run, mesh, stop=5 if mesh else 4)
    barrier()
    if this_rank() == 0:
        # What rank 1 alone reads is broken in the newest.
        cut(run / "checkpoint_3" / "random_states_1.pkl")
    if mesh and this_rank() == 0:
        # What no head of a file tells.
        noisy = run / "checkpoint_4" / "pytorch_model_fsdp_0" / "__0_0.distcp"
        noisy.write_bytes(b"\1" * noisy.stat().st_size)
        cut(run / "checkpoint_2" / "pytorch_model_fsdp_0" / "__1_0.distcp")
        (run / "checkpoint_1" / "optimizer_0" / "__0_0.distcp").unlink()
    barrier()
    with warnings_about("passes over") as told:
        rest = train(run, mesh, saves=False)
    assert Path(rest["folder"]).name == ("checkpoint_0" if mesh else "checkpoint_2")
    assert rest["losses"].items() <= whole.items()
    assert len(rest["losses"]) == 15 - (0 if mesh else 2)
    reasons = ["random_states_1.pkl"]
    if mesh:
        model, optimizer = (
            f"{n} could not be read" for n in ("pytorch_model_fsdp_0", "optimizer_0")
        )
        reasons = [model, *reasons, model, optimizer]
    assert len(told) == (len(reasons) if this_rank() == 0 else 0)
    assert all(reason in line for reason, line in zip(reasons, told, strict=False))


@pytest.mark.parametrize("mesh", [None, "fsdp, blocks"])
def test_another_number_of_ranks_goes_on_at_the_first_sample_not_seen(mesh, tmp_path):
    run_ranks(train, 2, str(tmp_path), mesh, 7)
    part = train(tmp_path, mesh=mesh)
    # 7 batches of 2 ranks: an epoch of 10 samples, and 4 samples.
    assert part["start"] == [1, 4, 4, 14]
    assert list(part["losses"])[:2] == ["1 4", "1 5"]
    back = run_ranks(train, 2, str(tmp_path), mesh, 2)
    assert back[0]["start"] == back[1]["start"] == [3, 0, 12, 30]
