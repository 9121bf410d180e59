"""The paths by which code imports Accelerate lead to the same names under ours."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest
import torch

import notebook_accel
from notebook_accel.launch import rank
from tests.training.harness import run_ranks
from tests.training.single import be, fresh_rank  # noqa: F401

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_accel.training.logs import MultiProcessAdapter


def test_paths_of_users_lead_to_our_own_objects() -> None:
    from notebook_accel.accelerator import Accelerator
    from notebook_accel.data_loader import DataLoaderShard, skip_first_batches
    from notebook_accel.logging import get_logger
    from notebook_accel.optimizer import AcceleratedOptimizer
    from notebook_accel.scheduler import AcceleratedScheduler
    from notebook_accel.state import AcceleratorState, GradientState, PartialState
    from notebook_accel.utils import ProjectConfiguration, set_seed

    assert Accelerator is notebook_accel.Accelerator
    assert AcceleratedOptimizer is notebook_accel.AcceleratedOptimizer
    assert AcceleratedScheduler is notebook_accel.AcceleratedScheduler
    assert AcceleratorState is notebook_accel.AcceleratorState
    assert GradientState is notebook_accel.GradientState
    assert PartialState is notebook_accel.PartialState
    assert ProjectConfiguration is notebook_accel.ProjectConfiguration
    assert set_seed is notebook_accel.set_seed
    assert callable(skip_first_batches)
    assert issubclass(DataLoaderShard, notebook_accel.data_loader.DataLoaderShard)
    assert isinstance(get_logger(__name__), logging.LoggerAdapter)


def test_a_path_that_is_not_built_is_absent() -> None:
    with pytest.raises(ImportError):
        import notebook_accel.no_such_door  # noqa: F401


def logger_of(name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> MultiProcessAdapter:
    from notebook_accel.logging import get_logger

    context = rank.RankContext(rank=index, local_rank=index, world_size=2, local_world_size=2)
    be(context, monkeypatch)
    return get_logger(name, "INFO")


def test_a_logger_writes_on_rank_0_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for index in (0, 1):
        logger = logger_of(f"compat.{index}", index, monkeypatch)
        logger.info("once %d", 1)
        logger.warning("all", main_process_only=False)
        logger.warning_once("again")
        logger.warning_once("again")
        logger.debug("never")
    assert [record.getMessage() for record in caplog.records] == [
        "[RANK 0] once 1",
        "[RANK 0] all",
        "[RANK 0] again",
        "[RANK 1] all",
    ]
    assert {record.filename for record in caplog.records} == {"test_compat.py"}


def log_in_order() -> bool:
    from notebook_accel.logging import get_logger

    get_logger("compat").warning("mine", main_process_only=False, in_order=True)
    return True


def test_a_logger_can_go_rank_by_rank() -> None:
    assert run_ranks(log_in_order, 2) == [True, True]


def save_and_show(folder: str) -> tuple[list[str], list[bool]]:
    from notebook_accel.utils import save, tqdm, wait_for_everyone

    index = os.environ["RANK"]
    save({"rank": index}, f"{folder}/of_{index}.pt")
    save({"w": torch.ones(1)}, f"{folder}/w_{index}.safetensors", safe_serialization=True)
    wait_for_everyone()
    bars = [tqdm([1]), tqdm([1], main_process_only=False), tqdm([1], disable=True)]
    hidden = [bar.disable for bar in bars]
    assert [list(bar) for bar in bars] == [[1]] * 3
    return sorted(os.listdir(folder)), hidden


def test_the_main_process_alone_saves_and_shows_a_bar(tmp_path: Path) -> None:
    files = ["of_0.pt", "w_0.safetensors"]
    assert run_ranks(save_and_show, 2, str(tmp_path)) == [
        (files, [False, False, True]),
        (files, [True, False, True]),
    ]
    assert torch.load(tmp_path / "of_0.pt") == {"rank": "0"}


def test_a_patched_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from notebook_accel.utils import patch_environment

    monkeypatch.setenv("COMPAT_OLD", "before")
    monkeypatch.delenv("COMPAT_NEW", raising=False)
    seen = []

    def leave_by_error() -> None:
        with patch_environment(compat_old=1, COMPAT_NEW="new"):
            seen.extend([os.environ["COMPAT_OLD"], os.environ["COMPAT_NEW"]])
            raise KeyError

    with pytest.raises(KeyError):
        leave_by_error()
    assert seen == ["1", "new"]
    assert os.environ["COMPAT_OLD"] == "before"
    assert "COMPAT_NEW" not in os.environ
