"""The paths by which code imports Accelerate lead to the same names under ours."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

import notebook_accel
from notebook_accel.launch import rank
from tests.training.harness import run_ranks
from tests.training.single import be, fresh_rank  # noqa: F401

if TYPE_CHECKING:
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
