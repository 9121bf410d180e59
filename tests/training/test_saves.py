"""Saves of several ranks: where models are spread all save together, and learn of every failure;
where each rank has whole models no rank waits for another, whoever saves."""

import contextlib
import os
import pickle
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from notebook_accel import Accelerator, NotebookAccelError, ProjectConfiguration
from notebook_accel.training.checkpoint import saves
from notebook_accel.training.collectives import this_rank
from notebook_accel.training.files.atomic import StagedFolder
from notebook_accel.training.processes.topology import barrier
from notebook_accel.training.strategies.ddp import DDPStrategy
from tests.training import resuming
from tests.training.harness import on_ranks, run_ranks, warnings_about
from tests.training.test_checkpoint import Evil
from tests.waiting import eventually

NUM_RANKS = 3
FILES = ["model.safetensors", "optimizer.bin", *(f"random_states_{n}.pkl" for n in range(3))]
OF_RANK_0 = FILES[:3]


def setup(**settings):
    accelerator = Accelerator(cpu=True, **settings)
    inner = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    return accelerator, (model, optimizer)


def step(accelerator, parts):
    accelerator.backward(parts[0](torch.ones(1, 2)).sum())
    parts[1].step()
    parts[1].zero_grad()


def save(accelerator, folder, **options):
    """Save, and wait until all that this rank has to write is there."""
    accelerator.save_state(folder, **options)
    accelerator.wait_for_checkpoint()


def files(folder):
    return sorted(os.listdir(folder))


@contextlib.contextmanager
def saving_together():
    """Let ranks with whole models save as if each had a part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDPStrategy, "saves_together", property(lambda self: True))
        yield


# All together.


@on_ranks(NUM_RANKS)
def test_the_folder_and_the_numbers_are_rank_0s(tmp_path):
    """Each rank made up a name, from the time say; then the numbers go on, also after a rank has
    counted otherwise."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator, _ = setup(project_config=project)
    with saving_together():
        paths = [accelerator.save_state(tmp_path / f"at_{accelerator.process_index}")]
        accelerator.project_configuration.iteration += accelerator.process_index
        paths += [accelerator.save_state(), accelerator.save_state()]
    barrier()
    assert [Path(path).name for path in paths] == ["at_0", "checkpoint_0", "checkpoint_1"]
    assert files(tmp_path) == ["at_0", "checkpoints"]
    assert [files(path) for path in paths] == [FILES] * 3


def disk_full(*_):
    raise OSError("disk full")


@pytest.mark.parametrize(("culprit", "in_background"), [(0, False), (1, False), (1, True)])
@on_ranks(NUM_RANKS)
def test_every_rank_learns_who_could_not_write(culprit, in_background, tmp_path):
    accelerator, _ = setup()
    is_culprit = accelerator.process_index == culprit
    with saving_together():
        if is_culprit:
            handle = accelerator.register_save_state_pre_hook(disk_full)
        with pytest.raises((OSError, NotebookAccelError)) as caught:
            save(accelerator, tmp_path / "state", async_save=in_background)
        if is_culprit:
            assert str(caught.value) == "disk full"
            handle.remove()
        else:
            told = str(caught.value)
            assert f"rank {culprit} could not write its part of the checkpoint" in told
            assert "stays as it is): OSError: disk full. Mend that on its machine" in told
        barrier()
        assert files(tmp_path) == [], "nothing is left"
        barrier()
        accelerator.save_state(tmp_path / "state")
        barrier()
        assert files(tmp_path) == ["state"], "the next save goes well"


@on_ranks(NUM_RANKS)
def test_outside_of_the_launcher_a_line_names_who_is_missing(tmp_path):
    """Ranks 0 and 2 wait until a line names rank 1, which only then comes."""
    accelerator, _ = setup()
    told = []

    def warn(text, **_):
        told.append(text)
        (tmp_path / "told").touch()

    def slices(_):
        """Let no time pass before both have come."""
        (tmp_path / f"waits-{accelerator.process_index}").touch()
        while True:
            have_come = all((tmp_path / f"waits-{rank}").exists() for rank in (0, 2))
            yield 60.0 if have_come else 0.0
            time.sleep(0.005)

    saves.warnings = SimpleNamespace(warn=warn)
    saves.slices = slices
    if accelerator.process_index == 1:
        eventually((tmp_path / "told").exists, within=60, what="the others are told")
    with saving_together():
        accelerator.save_state(tmp_path / "state")
    barrier()
    line = "save_state() waits for rank 1: call it on every rank, and take it out of `if"
    told = [text for text in told if "waits for" in text]
    assert [text[: len(line)] for text in told] == [line] * (accelerator.process_index == 0)


@on_ranks(NUM_RANKS)
def test_whole_models_are_saved_by_rank_0_alone_and_parts_by_all(tmp_path):
    accelerator, (model, _) = setup()
    if accelerator.is_main_process:
        accelerator.save_model(model, tmp_path / "encoder")
        accelerator.save_model(model, tmp_path / "decoder")
    with saving_together():
        accelerator.save_model(model, tmp_path / "parts")
        accelerator.save_state(tmp_path / "state")
    barrier()
    assert files(tmp_path) == ["decoder", "encoder", "parts", "state"]


def test_what_another_user_puts_into_the_store_runs_nothing(tmp_path, monkeypatch):
    """Torch's store lies on the loopback interface, and asks nobody for a secret."""
    monkeypatch.chdir(tmp_path)
    store = dist.HashStore()
    monkeypatch.setattr(saves, "exchange", lambda: SimpleNamespace(store=lambda: store))
    here = SimpleNamespace(process_index=0, local_process_index=0, num_processes=2)
    one = saves.Save(here, "", None, each_machine=False, joint=True)
    one.open(tmp_path / "state", Any)
    store.set(f"notebook_accel/{one.id} of 0/came/1", pickle.dumps(Evil()))
    with pytest.raises(ValueError):
        one.finish(None, lambda _: None)
    one.fail(ValueError())
    assert files(tmp_path) == []


# No rank waits for another.


@on_ranks(NUM_RANKS)
def test_rank_0_may_save_alone(tmp_path):
    """It saves, numbered too, then all do; and all load what has one rank's random states."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator, parts = setup(project_config=project)
    for _ in range(2):
        step(accelerator, parts)
        if accelerator.is_main_process:
            accelerator.save_state(tmp_path / "alone")
            accelerator.save_state()
    step(accelerator, parts)
    paths = [accelerator.save_state(tmp_path / "all"), accelerator.save_state()]
    accelerator.wait_for_everyone()
    assert [Path(path).name for path in paths] == ["all", "checkpoint_2"]
    assert (files(tmp_path / "alone"), files(tmp_path / "all")) == (OF_RANK_0, FILES)
    assert files(tmp_path / "checkpoints") == [f"checkpoint_{number}" for number in range(3)]
    with warnings_about("random states") as told:
        accelerator.load_state(tmp_path / "alone")
    assert len(told) == (accelerator.process_index == 1), "in one line"
    assert all("alone has no random states for rank 1, 2, which took" in text for text in told)


@on_ranks(NUM_RANKS)
def test_other_ranks_alone_save_nothing_and_do_not_hang(tmp_path):
    """Each by its own validation loss, say."""
    usual, saves._BEGIN_SECONDS = saves._BEGIN_SECONDS, 0.2
    accelerator, parts = setup()
    with warnings_about() as told:
        if not accelerator.is_main_process:
            save(accelerator, tmp_path / "best")
    assert len(told) == (not accelerator.is_main_process)
    saves._BEGIN_SECONDS = usual
    barrier()
    step(accelerator, parts)
    save(accelerator, tmp_path / "last")
    barrier()
    assert (files(tmp_path), files(tmp_path / "last")) == (["last"], FILES)


@on_ranks(NUM_RANKS)
def test_the_best_by_rank_0_alone_leaves_the_last_whole(tmp_path):
    """In one step, so that they differ by their names alone."""
    accelerator, _ = setup()
    if accelerator.is_main_process:
        accelerator.save_state(tmp_path / "best")
    save(accelerator, tmp_path / "last")
    barrier()
    assert (files(tmp_path / "best"), files(tmp_path / "last")) == (OF_RANK_0, FILES)


@on_ranks(NUM_RANKS)
def test_another_accelerator_loads_what_is_still_being_saved(tmp_path):
    # Nothing that waits for the other ranks is prepared.
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        time.sleep(0.1)  # the others wait here
    accelerator.save_state(tmp_path / "state")
    Accelerator(cpu=True).load_state(tmp_path / "state")
    assert files(tmp_path / "state")


@on_ranks(NUM_RANKS)
def test_late_ranks_add_their_files_to_their_own_checkpoint(tmp_path):
    """Some come after rank 0 has published, and rank 2 once its checkpoint has been replaced."""
    accelerator, _ = setup()
    for callers, there in [
        ([0], OF_RANK_0),
        ([1], FILES[:4]),
        ([0], OF_RANK_0),
        ([2], OF_RANK_0),
        ([1, 2], FILES),
    ]:
        if accelerator.process_index in callers:
            save(accelerator, tmp_path / "state", async_save=callers == [1])
        barrier()
        assert files(tmp_path / "state") == there
        barrier()
    assert files(tmp_path) == ["state"]


@pytest.mark.parametrize("culprit", [0, 1])
@on_ranks(NUM_RANKS)
def test_a_rank_that_cannot_write(culprit, tmp_path):
    accelerator, parts = setup()
    rank, path = accelerator.process_index, tmp_path / "state"
    told = ""
    if rank == culprit:
        handle = accelerator.register_save_state_pre_hook(disk_full)
    try:
        save(accelerator, path)
    except (OSError, NotebookAccelError) as error:
        told = str(error)
    barrier()
    if culprit == 0:
        of_rank_0 = "rank 0 could not write its part of the checkpoint (the last one stays as"
        assert told.startswith(of_rank_0 if rank else "disk full")
        assert not path.exists()
    else:
        assert told == ("disk full" if rank == 1 else "")
        assert files(path) == [*OF_RANK_0, FILES[4]]
    if rank == culprit:
        handle.remove()
    barrier()
    step(accelerator, parts)
    save(accelerator, path)
    barrier()
    assert (files(path), files(tmp_path)) == (FILES, ["state"])


@pytest.mark.parametrize("fails_first", [True, False])
@on_ranks(NUM_RANKS)
def test_no_empty_file_stays_of_a_rank_that_fails(fails_first, tmp_path):
    """Rank 1 has come, and fails just before rank 0 publishes, or just after."""
    accelerator, _ = setup()
    path = tmp_path / "state"
    came, counted, failed = (tmp_path / sign for sign in ("came", "counted", "failed"))

    def until(sign):
        eventually(sign.exists, within=30, what=f"{sign.name} is there")

    def hook(*_):
        if accelerator.process_index == 1:
            came.touch()
            until(counted if fails_first else path)
            raise OSError("disk full")
        until(came)

    class Late(StagedFolder):
        def publish(self, **options):
            counted.touch()
            if fails_first:
                until(failed)
            super().publish(**options)

    accelerator.register_save_state_pre_hook(hook)
    saves.atomic.StagedFolder = Late
    try:
        accelerator.save_state(path)
    except OSError:
        failed.touch()
    finally:
        saves.atomic.StagedFolder = StagedFolder
    accelerator.wait_for_checkpoint()
    barrier()
    assert files(path) == [*OF_RANK_0, FILES[4]]


@on_ranks(2)
def test_a_training_that_rank_0_alone_saves_is_resumed_to_the_bit(tmp_path):
    """As most published scripts of diffusers, which save by their main process."""

    def losses_of(name, stop):
        return resuming.train(
            tmp_path / name,
            samples=12,
            saves=lambda number: this_rank() == 0 and number % 4 == 3,
            stop=stop,
        )["losses"]

    whole, before, after = losses_of("whole", 0), losses_of("parts", 8), losses_of("parts", 0)
    # Saved after the first of the second epoch's batches, whose window is read again.
    assert next(iter(after)) == "1 0"
    assert {**before, **after} == whole


def dies_in_its_save(folder):
    accelerator, parts = setup()
    accelerator.save_state(f"{folder}/checkpoint_0")
    step(accelerator, parts)
    come = Path(folder, "come")
    if accelerator.process_index == 0:
        # Only what rank 0 finds under way is expected of the others.
        accelerator.register_save_state_pre_hook(
            lambda *_: eventually(come.exists, within=30, what="rank 1 comes")
        )
    else:

        def die(*_):
            come.touch()
            published = Path(folder, "checkpoint_1").exists
            eventually(published, within=30, what="rank 0 publishes")
            os.kill(os.getpid(), signal.SIGKILL)

        accelerator.register_save_state_pre_hook(die)
    accelerator.save_state(f"{folder}/checkpoint_1")


@on_ranks(2)
def check_that_it_is_passed_over(folder):
    accelerator, _ = setup()
    with warnings_about() as told:
        assert accelerator.resume_or_start(folder).folder == str(folder / "checkpoint_0")
        accelerator.load_state(folder / "checkpoint_1")
    if accelerator.is_main_process:
        assert "passes over" in told[0]
        assert "a rank ended before it had written its random_states_1.pkl" in told[0]
    else:
        # Asked for, it is loaded all the same.
        assert "no random states for rank 1" in told[-1]


def test_one_that_a_killed_rank_has_not_finished_is_passed_over(tmp_path):
    with pytest.raises(AssertionError, match="ended with status 9"):
        run_ranks(dies_in_its_save, 2, str(tmp_path))
    check_that_it_is_passed_over(folder=tmp_path)
