"""All ranks save together, as where models are spread over them: they learn of every failure."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from notebook_accel import Accelerator, ProjectConfiguration
from notebook_accel.training.checkpoint import saves
from notebook_accel.training.processes.topology import barrier
from notebook_accel.training.strategies.ddp import DDPStrategy
from tests.training.harness import run_ranks
from tests.training.single import fresh_rank  # noqa: F401
from tests.waiting import eventually

NUM_RANKS = 3
FILES = ["model.safetensors", "optimizer.bin", *(f"random_states_{n}.pkl" for n in range(3))]


@contextlib.contextmanager
def saving_together() -> Iterator[None]:
    """Let ranks with whole models save as if each had a part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDPStrategy, "saves_together", property(lambda self: True))
        yield


def setup(**settings: Any) -> tuple[Any, Any]:
    accelerator = Accelerator(cpu=True, **settings)
    inner = nn.Linear(2, 2)
    model, _ = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    return accelerator, model


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def saves_to_folders_of_their_own(folder: Path) -> dict[str, Any]:
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


def fails_on(rank: int, folder: Path, *, in_background: bool = False) -> str:
    accelerator, _ = setup()

    def hook(models: Any, weights: Any, output_dir: str) -> None:
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


def comes_late(folder: Path) -> list[str]:
    """Ranks 0 and 2 wait until a line names rank 1, which only then comes."""
    accelerator, _ = setup()
    saves._NOTICE_SECONDS = 0.05
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if accelerator.process_index == 1:
            eventually((folder / "told").exists, within=60, what="the others are told")
        else:
            plain = warnings.warn

            def warn(text: str, **options: Any) -> None:
                plain(text, **options)
                (folder / "told").touch()

            saves.warnings = SimpleNamespace(warn=warn)  # type: ignore[assignment]
        accelerator.save_state(folder / "state")
    saves.warnings = warnings  # type: ignore[assignment]
    barrier()
    return [str(one.message) for one in caught if "waits for" in str(one.message)]


def saves_models(folder: Path) -> list[str]:
    """Rank 0 alone where each rank has the model whole; and all where it is in parts."""
    accelerator, model = setup()
    if accelerator.is_main_process:
        accelerator.save_model(model, folder / "encoder")
        accelerator.save_model(model, folder / "decoder")
    with saving_together():
        accelerator.save_model(model, folder / "parts")
        accelerator.save_state(folder / "state")
    barrier()
    return files(folder)


def all_cases(folder: str) -> dict[str, Any]:
    root = Path(folder)
    cases: dict[str, Any] = {
        "folders": saves_to_folders_of_their_own,
        "late": comes_late,
        "rank 0 fails": lambda folder: fails_on(0, folder),
        "rank 1 fails": lambda folder: fails_on(1, folder),
        "rank 1 fails in the background": lambda folder: fails_on(1, folder, in_background=True),
        "models": saves_models,
    }
    results = {}
    for name, case in cases.items():
        (root / name).mkdir(exist_ok=True)
        barrier()
        with contextlib.nullcontext() if name == "models" else saving_together():
            results[name] = case(root / name)
        barrier()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_cases, NUM_RANKS, str(tmp_path_factory.mktemp("saves")))


def test_the_folder_and_the_numbers_are_rank_0s(ranks: list[dict[str, Any]]) -> None:
    for got in ranks:
        assert got["folders"] == {
            "paths": ["at_0", "checkpoint_0", "checkpoint_1"],
            "there": ["at_0", "checkpoints"],
            "in it": [FILES] * 3,
        }


@pytest.mark.parametrize("case", ["rank 0 fails", "rank 1 fails", "rank 1 fails in the background"])
def test_every_rank_learns_who_could_not_write(case: str, ranks: list[dict[str, Any]]) -> None:
    culprit = 0 if "0" in case else 1
    for rank, got in enumerate(ranks):
        told, _, listed = got[case].partition(" [")
        assert listed == "] ['state']", "nothing is left, and the next save goes well"
        if rank == culprit:
            assert told == "OSError: disk full"
        else:
            assert f"rank {culprit} could not write its part of the checkpoint" in told
            assert "stays as it is): OSError: disk full. Mend that on its machine" in told


def test_outside_of_the_launcher_a_line_names_who_is_missing(ranks: list[dict[str, Any]]) -> None:
    line = "save_state() waits for rank 1: call it on every rank, and take it out of `if"
    assert [len(got["late"]) for got in ranks] == [1, 0, 0]
    assert ranks[0]["late"][0].startswith(line)


def test_whole_models_are_saved_by_rank_0_alone(ranks: list[dict[str, Any]]) -> None:
    for got in ranks:
        assert got["models"] == ["decoder", "encoder", "parts", "state"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("evil",))


def test_what_another_user_puts_into_the_store_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's store lies on the loopback interface, and asks nobody for a secret."""
    monkeypatch.chdir(tmp_path)
    store = dist.HashStore()
    monkeypatch.setattr(saves, "exchange", lambda: SimpleNamespace(store=lambda: store))
    here: Any = SimpleNamespace(process_index=0, local_process_index=0, num_processes=2)
    save = saves.JointSave("save_state()", here)
    store.set("notebook_accel/save 1/wrote/1", pickle.dumps(Evil()))
    with pytest.raises(ValueError):
        save.finish(None, lambda _: None)
    assert files(tmp_path) == []
