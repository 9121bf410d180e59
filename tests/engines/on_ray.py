"""Ranks on a Ray cluster of two nodes. Run by: make test-ray."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_accel import LaunchConfig, LaunchError, RunStopped, WorkerError
from notebook_accel.launch.view import View
from tests.engines.contract import BUSY, _join_group
from tests.launches import launch
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from notebook_accel.launch.run import Run

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(400)
SLOW = 100.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    # It kills what runs on a machine whose memory others have filled.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - its name
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path / "runs"))


def on_ray(function: Any, *args: Any, n: int = 3, max_restarts: int = 0, **options: Any) -> Run:
    config = LaunchConfig(engine="ray", num_processes=n, devices="cpu", max_restarts=max_restarts)
    return launch(function, args, config=config, view=View(), **options)


def test_results_logs_and_progress_of_all_nodes() -> None:
    def train() -> tuple[int, float, str]:
        from notebook_accel import Accelerator

        accelerator = Accelerator()
        for step in accelerator.progress(range(3)):
            accelerator.log({"loss": 1.0}, step=step)
        print("rank", accelerator.process_index)
        total = accelerator.reduce(torch.ones(1))
        return accelerator.process_index, float(total), os.environ["LOCAL_WORLD_SIZE"]

    run = on_ray(train)
    assert [(rank, total) for rank, total, _ in run] == [(0, 3.0), (1, 3.0), (2, 3.0)]
    assert sorted(size for *_, size in run) == ["1", "2", "2"]
    assert run.logs(2) == "rank 2\n"
    assert [bar.n for bar in run.progress] == [3, 3, 3]
    assert len(run.metrics) == 3


def test_a_stop_and_a_failure() -> None:
    def train(fails: bool) -> None:
        from notebook_accel.launch import rank

        _join_group()
        if fails and os.environ["RANK"] == "2":
            raise ValueError("bad batch")
        while True:
            rank.current().count_batch()
            rank.current().count_step()
            torch.distributed.all_reduce(torch.ones(1))

    run = on_ray(train, False, block=False)
    eventually(lambda: run.status == "running", within=SLOW, what="it runs")
    run.stop()
    with pytest.raises(RunStopped):
        run.wait(BUSY)
    with pytest.raises(WorkerError, match="rank 2 failed: ValueError: bad batch"):
        on_ray(train, True)


def test_more_ranks_than_the_cluster_has_room_for() -> None:
    with pytest.raises(LaunchError, match=r"num_processes=99, and the Ray cluster has 4 CPUs"):
        on_ray(lambda: 1, n=99)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_node_that_dies(max_restarts: int, cluster: Any) -> None:
    def train() -> str:
        _join_group()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)
        return os.environ["WORLD_SIZE"]

    node = cluster.add_node(num_cpus=2)
    run = on_ray(train, n=5, max_restarts=max_restarts, block=False)
    eventually(lambda: run.status == "running", within=SLOW, what="it runs")
    died = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    if max_restarts:
        assert set(run.wait(SLOW).results) <= {"3", "4"}
    else:
        with pytest.raises(WorkerError) as caught:
            run.wait(SLOW)
        assert "was lost" in str(caught.value)
        assert time.monotonic() - died < 20
    with contextlib.suppress(Exception):
        run.kill()
