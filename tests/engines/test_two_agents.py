"""A run with several agents keeps the contract; what one must know of the others gets there."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from notebook_accel import RunStopped, WorkerError
from notebook_accel.launch import engines
from notebook_accel.launch.control import pool
from tests.engines import two_agents
from tests.engines.contract import BUSY, EngineContract, _join_group
from tests.waiting import eventually

if TYPE_CHECKING:
    from notebook_accel.launch.run import Run


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, two_agents.NAME, two_agents.TwoAgentsEngine)


class TestTwoAgents(EngineContract):
    engine = two_agents.NAME
    prelude = "from tests.engines.two_agents import register; register()"

    # What the template or one rank does by itself is the same behind any number of agents.
    test_a_stopped_template_is_replaced = None
    test_launch_error_when_the_template_dies_while_forking = None
    test_a_dead_template_hurts_no_run_and_the_next_launch_makes_a_new_one = None
    test_what_is_left_to_do_after_the_return_is_bounded = None
    test_a_daemon_of_a_rank_outlives_other_ranks_and_not_its_own = None

    def agents(self, run: Run) -> list[int]:
        """The pids of the run's agents, in the order of their ranks."""
        return list(dict.fromkeys(psutil.Process(pid).ppid() for pid in run.pids))

    # ---- who the ranks are -----------------------------------------------------------------

    def test_ranks_are_numbered_over_all_agents(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NOTEBOOK", "yes")

        def train() -> tuple[Any, ...]:
            import torch
            import torch.distributed as dist

            from notebook_accel.launch import rank

            _join_group()
            total = torch.tensor(float(os.environ["RANK"]))
            dist.all_reduce(total)
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OWN", "NOTEBOOK")
            own = tuple(os.environ[name] for name in names)
            return *own, rank.current().device_index, float(total)

        run = self.launch(train, n=4)
        assert run.results == [
            ("0", "0", "4", "2", "of rank 0", "no", 5, 6.0),
            ("1", "1", "4", "2", "of rank 1", "no", 6, 6.0),
            ("2", "0", "4", "2", "of rank 2", "no", 7, 6.0),
            ("3", "1", "4", "2", "of rank 3", "no", 8, 6.0),
        ]
        assert [rank.agent for rank in run.state.ranks] == [0, 0, 1, 1]

    def test_output_of_all_agents_is_whole(self) -> None:
        num_bytes = 12_000_000  # more than may be under way at once

        def train() -> None:
            for _ in range(num_bytes // 100):
                print("x" * 99)
            print("last of", os.environ["RANK"])

        run = self.launch(train, n=4)
        for rank in range(4):
            path = run.log_dir / f"rank-{rank}.log"
            assert path.stat().st_size == num_bytes + 10
            assert run.logs(rank).endswith(f"x\nlast of {rank}\n")

    # ---- the end of a call is the end everywhere -------------------------------------------

    @pytest.mark.parametrize("reads", [True, False], ids=["reads should_stop", "never asks"])
    def test_all_agents_ranks_leave_at_the_same_point(self, reads: bool, tmp_path: Path) -> None:
        def train(folder: str, reads: bool) -> None:
            import torch
            import torch.distributed as dist

            from notebook_accel.launch import rank

            _join_group()
            me, step = dist.get_rank(), 0

            def count() -> bool:
                # Ranks come one after the other: a stop finds some that passed, some that did not.
                time.sleep(0.005 * me)
                if reads:
                    return not rank.current().should_stop()
                rank.current().count_batch()
                return True

            try:
                while count():
                    dist.all_reduce(torch.ones(1))
                    rank.current().count_step()
                    step += 1
            finally:
                Path(folder, f"{me}-{time.time_ns()}").write_text(str(step))

        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            run = self.running(train, str(folder), reads, n=4)
            eventually(
                lambda run=run, n=number: min(rank.steps for rank in run.state.ranks) > 3 + n,
                within=BUSY,
                what="steps are counted",
            )
            run.stop()
            with contextlib.nullcontext() if reads else pytest.raises(RunStopped):
                run.wait(BUSY)
            assert run.status == "stopped"
            steps = [path.read_text() for path in folder.iterdir()]
            assert len(steps) == 4
            assert len(set(steps)) == 1, steps

    def test_a_failure_behind_one_agent_ends_the_ranks_of_the_other(self) -> None:
        def train(marker: str) -> None:
            if os.environ["RANK"] == "3":
                Path(marker).touch()
                raise ValueError("bad batch")
            time.sleep(600)

        error, seconds = self.fails(train, n=4)
        assert (error.rank, error.ranks) == (3, [3])
        assert isinstance(error.__cause__, ValueError)
        assert seconds < 5.0

    def test_a_dead_agent_of_two(self) -> None:
        def train(marker: str) -> None:
            _join_group()
            if os.environ["RANK"] == "3":
                Path(marker).touch()
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)

        error, seconds = self.fails(train, n=4)
        assert (error.rank, error.ranks) == (None, [0, 1, 2, 3])
        assert "watches ranks 2-3" in str(error)
        assert "SIGKILL" in str(error)
        assert seconds < 5.0

    def test_a_dead_agent_before_the_call_is_everywhere(self) -> None:
        """The second agent waits for the port of the call, which only the first one can name."""

        def train() -> None:
            time.sleep(600)

        def die(self: Any, port: int) -> None:
            self._links[0].kill()

        with pytest.MonkeyPatch.context() as patch:
            from notebook_accel.launch.control.pool import RankPool

            patch.setattr(RankPool, "_release_for_others", die)
            with pytest.raises(WorkerError) as caught:
                self.launch(train, n=4)
        assert (caught.value.rank, caught.value.ranks) == (None, [0, 1, 2, 3])
        assert "watches ranks 0-1" in str(caught.value)

    def test_a_frozen_agent_holds_up_neither_a_stop_nor_a_kill(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool, "_SILENT_SECONDS", 3.0)
        monkeypatch.setattr(pool, "_DEAF_SECONDS", 1.0)

        def train() -> None:
            time.sleep(600)

        for end in ("stop", "kill"):
            run = self.running(train, n=4)
            _, frozen = self.agents(run)
            os.kill(frozen, signal.SIGSTOP)
            getattr(run, end)()
            with pytest.raises(RunStopped):
                run.wait(30)
            assert run.status == "stopped"

    # ---- large values ----------------------------------------------------------------------

    def test_a_stop_during_a_large_payload(self) -> None:
        import torch

        data = torch.zeros(50_000_000)

        def train() -> float:
            _join_group()
            time.sleep(600)
            return float(data[0])

        run = self.launch(train, n=4, block=False)
        run.stop(grace=0.5)
        with pytest.raises(RunStopped):
            run.wait(BUSY)
