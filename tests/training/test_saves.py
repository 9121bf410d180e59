"""Saves of several ranks: where models are spread all save together, and learn of every failure;
where each rank has whole models no rank waits for another, whoever saves."""

import contextlib
import os
import pickle
import signal
import time
import warnings
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
from tests.training.harness import run_ranks
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


def files(folder):
    return sorted(os.listdir(folder))


@contextlib.contextmanager
def saving_together():
    """Let ranks with whole models save as if each had a part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDPStrategy, "saves_together", property(lambda self: True))
        yield


# All together.


def saves_to_folders_of_their_own(folder):
    """Each rank made up a name, from the time say; then the numbers go on, also after a rank has
    counted otherwise."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator, _ = setup(project_config=project)
    paths = [accelerator.save_state(folder / f"at_{accelerator.process_index}")]
    accelerator.project_configuration.iteration += accelerator.process_index
    paths += [accelerator.save_state(), accelerator.save_state()]
    barrier()
    return {
        "paths": [Path(path).name for path in paths],
        "there": files(folder),
        "in it": [files(Path(path)) for path in paths],
    }


def fails_on(rank, folder, *, in_background=False):
    accelerator, _ = setup()

    def hook(models, weights, output_dir):
        if accelerator.process_index == rank:
            raise OSError("disk full")

    handle = accelerator.register_save_state_pre_hook(hook)
    told = ""
    try:
        accelerator.save_state(folder / "state", async_save=in_background)
        accelerator.wait_for_checkpoint()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    handle.remove()
    barrier()
    there = files(folder)
    barrier()
    accelerator.save_state(folder / "state")
    barrier()
    return f"{told} {there} {files(folder)}"


def comes_late(folder):
    """Ranks 0 and 2 wait until a line names rank 1, which only then comes."""
    accelerator, _ = setup()
    saves._NOTICE_SECONDS = 0.05
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if accelerator.process_index == 1:
            eventually((folder / "told").exists, within=60, what="the others are told")
        else:
            plain = warnings.warn

            def warn(text, **options):
                plain(text, **options)
                (folder / "told").touch()

            saves.warnings = SimpleNamespace(warn=warn)
        accelerator.save_state(folder / "state")
    saves.warnings = warnings
    barrier()
    return [str(one.message) for one in caught if "waits for" in str(one.message)]


def saves_models(folder):
    """Rank 0 alone where each rank has the model whole; and all where it is in parts."""
    accelerator, (model, _) = setup()
    if accelerator.is_main_process:
        accelerator.save_model(model, folder / "encoder")
        accelerator.save_model(model, folder / "decoder")
    with saving_together():
        accelerator.save_model(model, folder / "parts")
        accelerator.save_state(folder / "state")
    barrier()
    return files(folder)


# No rank waits for another.


def rank_0_alone(folder):
    """It saves, numbered too, then all do; and all load what has one rank's random states."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator, parts = setup(project_config=project)
    for _ in range(2):
        step(accelerator, parts)
        if accelerator.is_main_process:
            accelerator.save_state(folder / "alone")
            accelerator.save_state()
    step(accelerator, parts)
    paths = [accelerator.save_state(folder / "all"), accelerator.save_state()]
    accelerator.wait_for_everyone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.load_state(folder / "alone")
    return {
        "paths": [Path(path).name for path in paths],
        "there": {name: files(folder / name) for name in ("alone", "all", "checkpoints")},
        "told": [str(one.message) for one in caught if "random states" in str(one.message)],
    }


def any_rank_but_0(folder):
    """Each by its own validation loss, say."""
    saves._BEGIN_SECONDS = 0.2
    accelerator, parts = setup()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not accelerator.is_main_process:
            accelerator.save_state(folder / "best")
            accelerator.wait_for_checkpoint()
    barrier()
    step(accelerator, parts)
    accelerator.save_state(folder / "last")
    accelerator.wait_for_checkpoint()
    barrier()
    return {"there": files(folder), "last": files(folder / "last"), "told": len(caught)}


def best_by_rank_0_and_last_by_all(folder):
    """In one step, so that they differ by their names alone."""
    accelerator, _ = setup()
    if accelerator.is_main_process:
        accelerator.save_state(folder / "best")
    accelerator.save_state(folder / "last")
    accelerator.wait_for_checkpoint()
    barrier()
    return [files(folder / name) for name in ("best", "last")]


def loads_in_another_accelerator(folder):
    """What rank 0 is still writing when the others come to load it."""
    # Nothing that waits for the other ranks is prepared.
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        time.sleep(0.1)  # the others wait 0.2 s here
    accelerator.save_state(folder / "at once")
    Accelerator(cpu=True).load_state(folder / "at once")
    return {"there": files(folder / "at once")}


def late_ranks(folder):
    """Some come after rank 0 has published, and rank 2 once its checkpoint has been replaced."""
    accelerator, _ = setup()
    seen = []
    for callers in ([0], [1], [0], [2], [1, 2]):
        if accelerator.process_index in callers:
            accelerator.save_state(folder / "state", async_save=callers == [1])
            accelerator.wait_for_checkpoint()
        barrier()
        seen.append(files(folder / "state"))
        barrier()
    return {"seen": seen, "left": files(folder)}


def a_failing_rank(folder):
    told = []
    for rank in range(2):
        accelerator, parts = setup()
        path = folder / f"of {rank}"

        def hook(*_, rank=rank, accelerator=accelerator):
            if accelerator.process_index == rank:
                raise OSError("disk full")

        handle = accelerator.register_save_state_pre_hook(hook)
        try:
            accelerator.save_state(path)
            accelerator.wait_for_checkpoint()
            told.append("")
        except (OSError, NotebookAccelError) as error:
            told.append(str(error))
        handle.remove()
        barrier()
        told.append(str(path.exists() and files(path)))
        barrier()
        step(accelerator, parts)
        accelerator.save_state(path)
        accelerator.wait_for_checkpoint()
        barrier()
        told.append(str(files(path)))
    return {"told": told, "left": files(folder)}


def fails_beside(path, *, is_before):
    accelerator, _ = setup()
    came, counted, failed = (path.with_suffix(f".{sign}") for sign in ("came", "counted", "failed"))

    def until(sign):
        eventually(sign.exists, within=30, what=f"{sign.name} is there")

    def hook(*_):
        if accelerator.process_index == 1:
            came.touch()
            until(counted if is_before else path)
            raise OSError("disk full")
        until(came)

    class Late(StagedFolder):
        def publish(self, **options):
            counted.touch()
            if is_before:
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
    return files(path)


def fails_as_rank_0_publishes(folder):
    """Rank 1 has come, and fails just before rank 0 publishes, or just after."""
    return [fails_beside(folder / str(when), is_before=when) for when in (True, False)]


TOGETHER = {
    "folders": saves_to_folders_of_their_own,
    "late": comes_late,
    "rank 0 fails": lambda folder: fails_on(0, folder),
    "rank 1 fails": lambda folder: fails_on(1, folder),
    "rank 1 fails in the background": lambda folder: fails_on(1, folder, in_background=True),
}
ALONE = {
    "models": saves_models,
    "rank 0": rank_0_alone,
    "any but rank 0": any_rank_but_0,
    "best and last": best_by_rank_0_and_last_by_all,
    "late ranks": late_ranks,
    "another accelerator": loads_in_another_accelerator,
    "a failing rank": a_failing_rank,
    "fails as rank 0 publishes": fails_as_rank_0_publishes,
}


def all_cases(folder):
    results = {}
    for name, case in {**TOGETHER, **ALONE}.items():
        place = Path(folder, name)
        place.mkdir(exist_ok=True)
        barrier()
        with saving_together() if name in TOGETHER else contextlib.nullcontext():
            results[name] = case(place)
        barrier()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(all_cases, NUM_RANKS, str(tmp_path_factory.mktemp("saves")))


def test_the_folder_and_the_numbers_are_rank_0s(ranks):
    for got in ranks:
        assert got["folders"] == {
            "paths": ["at_0", "checkpoint_0", "checkpoint_1"],
            "there": ["at_0", "checkpoints"],
            "in it": [FILES] * 3,
        }


@pytest.mark.parametrize("case", ["rank 0 fails", "rank 1 fails", "rank 1 fails in the background"])
def test_every_rank_learns_who_could_not_write(case, ranks):
    culprit = 0 if "0" in case else 1
    for rank, got in enumerate(ranks):
        told, _, listed = got[case].partition(" [")
        assert listed == "] ['state']", "nothing is left, and the next save goes well"
        if rank == culprit:
            assert told == "OSError: disk full"
        else:
            assert f"rank {culprit} could not write its part of the checkpoint" in told
            assert "stays as it is): OSError: disk full. Mend that on its machine" in told


def test_outside_of_the_launcher_a_line_names_who_is_missing(ranks):
    line = "save_state() waits for rank 1: call it on every rank, and take it out of `if"
    assert [len(got["late"]) for got in ranks] == [1, 0, 0]
    assert ranks[0]["late"][0].startswith(line)


def test_whole_models_are_saved_by_rank_0_alone(ranks):
    for got in ranks:
        assert got["models"] == ["decoder", "encoder", "parts", "state"]


def test_what_another_user_puts_into_the_store_runs_nothing(tmp_path, monkeypatch):
    """Torch's store lies on the loopback interface, and asks nobody for a secret."""
    monkeypatch.chdir(tmp_path)
    store = dist.HashStore()
    monkeypatch.setattr(saves, "exchange", lambda: SimpleNamespace(store=lambda: store))
    here = SimpleNamespace(process_index=0, local_process_index=0, num_processes=2)
    save = saves.Save(here, "", None, each_machine=False, joint=True)
    save.open(tmp_path / "state", Any)
    store.set(f"notebook_accel/{save.id} of 0/came/1", pickle.dumps(Evil()))
    with pytest.raises(ValueError):
        save.finish(None, lambda _: None)
    save.fail(ValueError())
    assert files(tmp_path) == []


def test_rank_0_may_save_alone(ranks):
    got = [one["rank 0"] for one in ranks]
    for one in got:
        assert one["paths"] == ["all", "checkpoint_2"]
        checkpoints = [f"checkpoint_{number}" for number in range(3)]
        assert one["there"] == {"alone": OF_RANK_0, "all": FILES, "checkpoints": checkpoints}
    assert [len(one["told"]) for one in got] == [0, 1, 0], "in one line"
    assert "alone has no random states for rank 1, 2, which took no part" in got[1]["told"][0]


def test_other_ranks_alone_save_nothing_and_do_not_hang(ranks):
    for rank, got in enumerate(ranks):
        assert got["any but rank 0"] == {"there": ["last"], "last": FILES, "told": int(rank > 0)}


def test_the_best_by_rank_0_alone_leaves_the_last_whole(ranks):
    for got in ranks:
        assert got["best and last"] == [OF_RANK_0, FILES]


def test_another_accelerator_loads_what_is_still_being_saved(ranks):
    for got in ranks:
        assert got["another accelerator"]["there"]


def test_late_ranks_add_their_files_to_their_own_checkpoint(ranks):
    for got in ranks:
        assert got["late ranks"]["seen"] == [OF_RANK_0, FILES[:4], OF_RANK_0, OF_RANK_0, FILES]
        assert got["late ranks"]["left"] == ["state"]


def test_a_rank_that_cannot_write(ranks):
    for rank, got in enumerate(ranks):
        told = got["a failing rank"]["told"]
        of_rank_0 = "rank 0 could not write its part of the checkpoint (the last one stays as"
        assert told[0].startswith(of_rank_0 if rank else "disk full")
        assert told[1:3] == ["False", str(FILES)]
        assert told[3] == ("disk full" if rank == 1 else "")
        assert told[4:] == [str([*FILES[:3], FILES[4]]), str(FILES)]
        assert got["a failing rank"]["left"] == ["of 0", "of 1"]


def test_no_empty_file_stays_of_a_rank_that_fails(ranks):
    for got in ranks:
        assert got["fails as rank 0 publishes"] == [[*FILES[:3], FILES[4]]] * 2


def train(folder, stop):
    """As most published scripts of diffusers, which save by their main process."""
    return resuming.train(
        folder, samples=12, saves=lambda number: this_rank() == 0 and number % 4 == 3, stop=stop
    )["losses"]


def test_a_training_that_rank_0_alone_saves_is_resumed_to_the_bit(tmp_path):
    whole = run_ranks(train, 2, str(tmp_path / "whole"), 0)
    first = run_ranks(train, 2, str(tmp_path / "parts"), 8)
    rest = run_ranks(train, 2, str(tmp_path / "parts"), 0)
    for one, before, after in zip(whole, first, rest, strict=True):
        # Saved after the first of the second epoch's batches, whose window is read again.
        assert next(iter(after)) == "1 0"
        assert {**before, **after} == one


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


def resumes(folder):
    accelerator, _ = setup()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = accelerator.resume_or_start(folder)
        accelerator.load_state(Path(folder) / "checkpoint_1")
    return start.folder, [str(one.message) for one in caught]


def test_one_that_a_killed_rank_has_not_finished_is_passed_over(tmp_path):
    with pytest.raises(AssertionError, match="ended with status 9"):
        run_ranks(dies_in_its_save, 2, str(tmp_path))
    first, second = run_ranks(resumes, 2, str(tmp_path))
    for folder, _ in (first, second):
        assert folder == str(tmp_path / "checkpoint_0")
    assert "passes over" in first[1][0]
    assert "a rank ended before it had written its random_states_1.pkl" in first[1][0]
    # Asked for, it is loaded all the same.
    assert "no random states for rank 1" in second[1][-1]
