"""Saving on all ranks, on some, or on the main process alone: nobody waits for ever."""

from __future__ import annotations

import os
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from notebook_accel import Accelerator, NotebookAccelError, ProjectConfiguration
from notebook_accel.training.checkpoint import meeting
from notebook_accel.training.collectives import wait
from notebook_accel.training.strategies.ddp import DataParallel
from tests.training.harness import run_ranks
from tests.training.single import fresh_rank  # noqa: F401

QUICK = meeting.Patience(first=0.3, known=5, rest=5, notice=0.1, missing=0.5, rank_0=5)


def setup(patience: meeting.Patience = QUICK, **settings: Any) -> Any:
    accelerator = Accelerator(cpu=True, **settings)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator._checkpoints._meetings.patience = patience
    return accelerator, model, optimizer


def train(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def saves_on_the_main_process(folder: Path) -> dict[str, Any]:
    parts = setup()
    accelerator, model, _ = parts
    seconds = []
    for epoch in range(3):
        train(*parts)
        began = time.monotonic()
        if accelerator.is_main_process:
            accelerator.save_state(folder / f"best_{epoch}")
            accelerator.save_model(model, folder / "model")
        seconds.append(time.monotonic() - began)
        accelerator.save_state(folder / "last")
    accelerator.load_state(folder / "last")
    wait()
    found = {name: files(folder / name) for name in files(folder)}
    accelerator.load_state(folder / "best_2")
    return {"files": found, "later": seconds[1:]}


def saves_slowly_on_the_main_process(folder: Path) -> dict[str, Any]:
    """Rank 1 waits at the next save long enough to take another folder, or other lines."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    patience = meeting.Patience(first=0.1, known=5, other_folder=0.05)
    accelerator, model, _ = setup(patience, project_config=project)
    # Rank 0 takes its time where it is alone.
    seconds = iter([0.3, 0, 0.3] if accelerator.is_main_process else [])
    slow = model.module.register_state_dict_post_hook(lambda *_: time.sleep(next(seconds, 0)))
    if accelerator.is_main_process:
        accelerator.save_model(model, folder / "export")
    accelerator.save_state(folder / "after_export")
    if accelerator.is_main_process:
        accelerator.save_state(folder / "best")
    path = accelerator.save_state()
    slow.remove()
    # The same folder, and another call: rank 1 is no member of rank 0's.
    if accelerator.is_main_process:
        accelerator.save_state(folder / "both")
    accelerator.save_model(model, folder / "both")
    wait()
    numbered = sorted(files(folder / "checkpoints"))
    found = {name: files(folder / name) for name in files(folder) if name != "checkpoints"}
    return {
        "path": Path(path).name,
        "numbered": numbered,
        "files": found,
        "in it": files(Path(path)),
    }


def saves_late(folder: Path) -> dict[str, Any]:
    """Rank 1 comes to the first save when rank 0 has gone on without it; to the next in time."""
    accelerator, *_ = setup()
    paths, listed = [], []
    for number in range(2):
        # It has no collective in between: the position stays that of rank 0.
        if not accelerator.is_main_process:
            while not (folder / "listed").exists():
                time.sleep(0.01)
            time.sleep(0.1)
        paths.append(accelerator.save_state(folder / f"state_{number}"))
        listed.append(files(Path(paths[-1])))
        (folder / "listed").touch()
        wait()
    return {"paths": paths, "listed": listed, "both": files(Path(paths[0]))}


def saves_in_a_window(folder: Path) -> dict[str, Any]:
    """With gradients of each rank that no step has used: by rank 0 alone, and by rank 1 late."""
    accelerator, model, optimizer = setup(gradient_accumulation_steps=4)
    with accelerator.accumulate(model):
        inputs = torch.full((1, 2), 1.0 + accelerator.process_index)
        accelerator.backward(model(inputs).sum())
        optimizer.step()
    if accelerator.is_main_process:
        accelerator.save_state(folder / "alone")
    else:
        while not (folder / "late").exists():
            time.sleep(0.01)
    accelerator.save_state(folder / "late")
    wait()
    found: dict[str, Any] = {"folder": str(folder)}
    for name in ("alone", "late"):
        accelerator, model, optimizer = setup(gradient_accumulation_steps=4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.load_state(folder / name)
        found[name] = {
            "step": accelerator._plan.accumulation.step,
            "gradient": model.module.weight.grad[0, 0].item(),
            "told": any("without the gradients of rank 1" in str(one.message) for one in caught),
        }
    return found


def saves_to_two_folders(folder: Path) -> dict[str, Any]:
    """Each rank made up a name of its own, from the time say: rank 0's counts."""
    accelerator, *_ = setup(meeting.Patience(first=0.2, other_folder=0.5))
    path = accelerator.save_state(folder / f"at_{accelerator.process_index}")
    wait()
    return {
        "path": Path(path).name,
        "files": {name: files(folder / name) for name in files(folder)},
    }


def saves_models_in_a_row(folder: Path) -> list[str]:
    accelerator, model, _ = setup()
    if not accelerator.is_main_process:
        time.sleep(0.5)  # rank 0 is through with both by then
    accelerator.save_model(model, folder / "encoder")
    accelerator.save_model(model, folder / "decoder")
    return files(folder)


def fails_on(rank: int, folder: Path) -> str:
    accelerator, *_ = setup()

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        if accelerator.process_index == rank:
            raise OSError("disk full")

    accelerator.register_save_state_pre_hook(hook)
    try:
        accelerator.save_state(folder / "state")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        wait()


def saves_what_is_spread(folder: Path) -> str:
    """Rank 0 alone, where each rank has only a part of the model."""
    DataParallel.saves_together = property(lambda self: True)  # type: ignore[assignment,method-assign]
    accelerator, model, _ = setup()
    told = ""
    for save in (
        lambda: accelerator.save_state(folder / "state"),
        lambda: accelerator.save_model(model, folder / "model"),
    ):
        if accelerator.is_main_process:
            try:
                save()
            except NotebookAccelError as error:
                told += str(error)
        wait()
    accelerator.save_state(folder / "all")
    return told + str(files(folder))


def comes_without_rank_0(folder: Path) -> str:
    accelerator, *_ = setup(meeting.Patience(rank_0=0.2))
    told = ""
    if not accelerator.is_main_process:
        try:
            accelerator.save_state(folder / "state")
        except NotebookAccelError as error:
            told = str(error)
    wait()
    return told


def all_cases(folder: str) -> dict[str, Any]:
    root = Path(folder)
    cases: dict[str, Any] = {
        "main": saves_on_the_main_process,
        "slowly": saves_slowly_on_the_main_process,
        "late": saves_late,
        "window": saves_in_a_window,
        "two": saves_to_two_folders,
        "row": saves_models_in_a_row,
        "rank 0 fails": lambda folder: fails_on(0, folder),
        "rank 1 fails": lambda folder: fails_on(1, folder),
        "not rank 0": comes_without_rank_0,
        "spread": saves_what_is_spread,
    }
    results = {}
    for name, case in cases.items():
        (root / name).mkdir(exist_ok=True)
        wait()
        results[name] = case(root / name)
        wait()
    return results


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_cases, 2, str(tmp_path_factory.mktemp("saves")))


OWN = ["model.safetensors", "optimizer.bin", "random_states_0.pkl"]
ALL = [*OWN, "random_states_1.pkl"]


def test_the_main_process_saves_alone(both: list[dict[str, Any]]) -> None:
    for got in both:
        assert got["main"]["files"] == {
            **{f"best_{epoch}": OWN for epoch in range(3)},
            "last": ALL,
            "model": ["model.safetensors"],
        }
    assert max(both[0]["main"]["later"]) < QUICK.first, "it waits for the others once a line"


def test_a_rank_takes_no_save_of_the_main_process_for_its_own(both: list[dict[str, Any]]) -> None:
    for got in both:
        assert got["slowly"] == {
            "path": "checkpoint_0",
            "numbered": ["checkpoint_0"],
            "in it": ALL,
            "files": {
                "after_export": ALL,
                "best": OWN,
                "both": OWN,
                "export": ["model.safetensors"],
            },
        }


def test_a_rank_that_comes_late_adds_what_is_its_own(both: list[dict[str, Any]]) -> None:
    assert both[0]["late"]["listed"] == [OWN, ALL], "rank 0 waits for it the next time"
    assert [got["late"]["both"] for got in both] == [ALL, ALL]
    assert both[0]["late"]["paths"] == both[1]["late"]["paths"]


def test_a_window_goes_on_alike_on_ranks_that_were_not_saved(both: list[dict[str, Any]]) -> None:
    alone = {"step": 1, "gradient": 0.25, "told": True}
    assert both[0]["window"]["alone"] == alone
    assert both[1]["window"]["alone"] == {**alone, "told": False}, "one rank of a machine says it"
    assert both[0]["window"]["late"] == {"step": 1, "gradient": 0.25, "told": False}
    assert both[1]["window"]["late"] == {"step": 1, "gradient": 0.5, "told": False}
    accelerator, model, _ = setup(gradient_accumulation_steps=4)
    with pytest.warns(UserWarning, match="without the gradients of rank 1: the mean of the others"):
        accelerator.load_state(f"{both[0]['window']['folder']}/alone")
    assert accelerator._plan.accumulation.step == 1
    assert model.weight.grad[0, 0] == 0.25


def test_the_folder_is_rank_0s(both: list[dict[str, Any]]) -> None:
    for got in both:
        assert got["two"] == {"path": "at_0", "files": {"at_0": ALL}}


def test_models_that_are_saved_in_a_row_are_not_confused(both: list[dict[str, Any]]) -> None:
    assert [got["row"] for got in both] == [["decoder", "encoder"]] * 2


def test_a_rank_that_cannot_write_is_named_to_the_others(both: list[dict[str, Any]]) -> None:
    assert both[0]["rank 0 fails"] == "OSError: disk full"
    assert "rank 0 could not write" in both[1]["rank 0 fails"]
    assert "OSError: disk full" in both[1]["rank 0 fails"]
    assert both[1]["rank 1 fails"] == "OSError: disk full"
    assert "rank 1 could not write its part of the checkpoint" in both[0]["rank 1 fails"]
    assert "stays as it is): OSError: disk full. Mend that" in both[0]["rank 1 fails"]


def test_where_all_are_needed_the_missing_are_named(both: list[dict[str, Any]]) -> None:
    told = both[0]["spread"]
    for call in ("save_state()", "save_model()"):
        assert f"{call}: rank 1 did not come to it within" in told
    assert "is_main_process" in told
    assert told.endswith("['all']")
    assert "rank 0 did not come to it within 0 s" in both[1]["not rank 0"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("evil",))


def test_what_another_user_puts_into_the_store_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's store lies on the loopback interface, and asks nobody for a secret."""
    monkeypatch.chdir(tmp_path)
    store = dist.HashStore()
    monkeypatch.setattr(meeting.Meetings, "_store", store)
    plan = meeting.SavePlan(
        number=1, call="c", asked="", position=0, lines="", final="", staged="", members=(1,)
    )
    store.set("wrote/1/1", "")
    store.set("results/1/1", pickle.dumps(Evil()))
    topology: Any = None
    with pytest.raises(ValueError):
        meeting.Meetings(topology).wait_for_members(plan)
    assert files(tmp_path) == []
