"""What every engine that has agents must do; each engine's test file runs this suite."""

import atexit
import builtins
import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from tqdm import tqdm

from notebook_accel import Accelerator, LaunchError, RunStopped, WorkerError, wire
from notebook_accel.config import LaunchConfig
from notebook_accel.launch import launcher
from notebook_accel.launch.control import pool
from notebook_accel.launch.control.pool import RankPool
from notebook_accel.launch.control.run_folder import RunFolder, run_folders
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.launcher import Session
from notebook_accel.launch.run import Run
from notebook_accel.launch.run_list import runs
from notebook_accel.launch.template.handle import template
from notebook_accel.launch.view import View
from notebook_accel.rank.this_rank import current
from tests.engines.processes import below, gone, of_launches
from tests.launches import call, launch, without_gloo
from tests.templates import IMPORT_LITTLE
from tests.waiting import eventually

# Deadlines, wide enough for a busy machine; benchmarks/faults.py measures what users see.
# A failure is told sooner than after the grace, which is for those who are asked to stop.
SOON, LONG_GRACE = 60.0, 300.0
CLEAN = 60.0
BUSY = 60.0


class EngineContract:
    """Subclasses say the engine, and what another process runs before it can name that."""

    engine = "local"
    prelude = ""
    # Ranks of a launch whose test says no number. The last of them is the one that fails.
    world_size = 2
    # Those of them that share the cores of a machine.
    local_world_size = 2
    # How often they are stopped at a point: more of it finds more orders of events.
    num_stops = 1
    # What launches say beside; how far above a rank its agent is; what ACCELERATE_USE_CPU says.
    settings: ClassVar[dict[str, Any]] = {"devices": "cpu"}
    agent_above = 1
    uses_cpu = "true"

    # ---- the fixture -----------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setenv("NOTEBOOK_ACCEL_RUNS", str(tmp_path / "runs"))
        yield
        try:
            eventually(
                lambda: not self.alive(), within=CLEAN, what="every process of the run ended"
            )
        finally:
            # What a failing test leaves must not fail those that follow.
            for process in self.alive():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def alive(self) -> list[psutil.Process]:
        return [process for process in of_launches(os.getpid()) if process.pid != template().pid]

    def config(self, n: int | None = None, **options: Any) -> LaunchConfig:
        number = n or self.world_size
        return LaunchConfig(
            engine=self.engine, num_processes=number, **{**self.settings, **options}
        )

    def launch(
        self, function: Any, *args: Any, n: int | None = None, grace: float = 10.0, **options: Any
    ) -> Run:
        config = self.config(n, grace=grace)
        return launch(function, args, config=config, **{"view": View(), **options})

    def fails(self, function: Any, *args: Any, **options: Any) -> tuple[WorkerError, float]:
        """Return the error of a launch, and the seconds from the event (``mark()``) to it."""
        marker = Path(os.environ["NOTEBOOK_ACCEL_RUNS"]).with_name("event")
        with pytest.raises(WorkerError) as caught:
            self.launch(function, str(marker), *args, grace=LONG_GRACE, **options)
        return caught.value, time.time() - marker.stat().st_mtime

    # ---- results ---------------------------------------------------------------------------

    def test_results_come_back_in_the_order_of_ranks(self):
        def train(a, b=0):
            return str(current().rank), os.environ["WORLD_SIZE"], a + b

        run = self.launch(train, 1, n=3, kwargs={"b": 2})
        assert run.results == [("0", "3", 3), ("1", "3", 3), ("2", "3", 3)]
        assert (run[1], len(run), list(run)) == (run.results[1], 3, run.results)
        assert run.status == "succeeded"
        assert run in runs()

    def test_results_of_any_size(self):
        def train():
            return torch.full((20_000_000,), float(current().rank))

        run = self.launch(train)
        assert [float(tensor[-1]) for tensor in run] == [*range(self.world_size)]
        run[0].add_(1.0)
        assert float(run[0][0]) == 1.0

    def test_a_world_of_one_and_exit_zero_is_success(self):
        def train():
            sys.exit(0)

        run = self.launch(train, n=1)
        assert run.results == [None]
        assert run.status == "succeeded"

    # ---- environment -----------------------------------------------------------------------

    def test_the_notebooks_surroundings(self, tmp_path, monkeypatch):
        (tmp_path / "beside_the_notebook.py").write_text("value = 41\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("SOMETHING_OF_MINE", "here")
        monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")

        def train():
            import beside_the_notebook

            return (
                beside_the_notebook.value,
                os.environ["SOMETHING_OF_MINE"],
                os.getcwd(),
                "MPLBACKEND" in os.environ,
                torch.get_num_threads(),
                os.environ["ACCELERATE_USE_CPU"],
            )

        threads = max(1, len(os.sched_getaffinity(0)) // self.local_world_size)
        told = (41, "here", str(tmp_path), False, threads, self.uses_cpu)
        assert self.launch(train)[-1] == told
        (tmp_path / "beside_the_notebook.py").write_text("value = 4242\n")
        assert self.launch(train)[0][0] == 4242

    def test_the_port_is_held_and_usable(self):
        def train():
            total = torch.zeros(1)
            # One rank is early for the next group, now this one and now that.
            for _ in range(10):
                dist.init_process_group("gloo")
                total += 1
                dist.all_reduce(total)
                dist.destroy_process_group()
            return float(total)

        assert self.launch(train).results == [2046.0, 2046.0]

    # ---- output ----------------------------------------------------------------------------

    def test_output_is_whole_and_in_order(self):
        def train():
            print("python")
            ctypes.CDLL(None).printf(b"from C\n")
            print("error", file=sys.stderr)
            subprocess.run(["echo", "child"], check=True)
            print("10%\r20%\r30%")
            display("shown")  # noqa: F821 - notebooks have it
            if _is_last():
                ctypes.CDLL(None).printf(b"last words\n")
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(WorkerError) as caught:
            self.launch(train)
        run = caught.value.run
        expected = ["python", "from C", "error", "child", "30%", "'shown'", "last words"]
        assert run.logs(-1).split("\n")[:-1] == expected
        assert f"[rank {self.world_size - 1}] child" in run.logs()
        assert run.log_dir.is_dir()

    def test_a_flood_of_lines_is_whole(self):
        num_lines = 100_000

        def train():
            for number in range(num_lines):
                print("line", number)

        run = self.launch(train)
        expected = [f"line {number}" for number in range(num_lines)]
        for rank in range(self.world_size):
            assert run.logs(rank).splitlines() == expected

    def test_bars_and_metrics_become_live_state(self):
        def train():
            for step in tqdm(range(3), desc="epoch", leave=False):
                current().metric({"loss": 1.0 / (step + 1)}, step)

        run = self.launch(train)
        ranks = range(self.world_size)
        bars = sorted((bar.rank, bar.name, bar.n, bar.total) for bar in run.progress)
        assert bars == [(rank, "epoch", 3, 3) for rank in ranks]
        rows = sorted((row["rank"], row["step"], row["name"]) for row in run.metrics)
        assert rows == [(rank, step, "loss") for rank in ranks for step in range(3)]
        assert run.logs() == ""

    # ---- failures --------------------------------------------------------------------------

    def test_one_rank_raises(self):
        def train(marker):
            _join_group()
            if _is_last():
                Path(marker).touch()
                raise ValueError("bad batch")
            _talk_for_ever()

        error, seconds = self.fails(train)
        last = self.world_size - 1
        assert (error.rank, error.ranks, error.exitcode, error.signal) == (last, [last], 1, None)
        assert f"rank {last} failed: ValueError: bad batch" in str(error)
        assert 'raise ValueError("bad batch")' in error.traceback
        assert "reset by peer" not in str(error)
        assert isinstance(error.__cause__, ValueError)
        assert seconds < SOON
        run = error.run
        assert run.status == "failed"
        assert run.results == [None] * self.world_size

    def test_an_error_whose_report_takes_long_is_told_too(self):
        class BadBatch(Exception):
            """Rank 0 raises it once the others have, and reports it before they do."""

            def __str__(self):
                Path(f"{self.args[0]}-{current().rank}").touch()
                if current().rank:
                    reports = Path(f"{self.args[0]}-0").exists
                    eventually(reports, what="rank 0 reports its error")
                    time.sleep(0.6)
                return "bad batch"

        def train(marker):
            Path(marker).touch()
            for rank in range(1, current().world_size) if current().rank == 0 else ():
                eventually(Path(f"{marker}-{rank}").exists, what="another rank has raised it")
            raise BadBatch(marker)

        error, _ = self.fails(train)
        assert error.ranks == [*range(self.world_size)]

    def test_a_rank_that_waits_for_one_that_has_returned(self):
        def train(marker):
            _join_group()
            if current().rank == 1:
                Path(marker).touch()
                return
            dist.barrier()

        error, _ = self.fails(train)
        assert (error.rank, error.ranks) == (0, [0])
        first, *_ = str(error).splitlines()
        assert "rank 1 has returned already, while rank 0 still waits in barrier at " in first
        assert re.search(r"barrier at contract\.py, line \d+: every rank must make the", first)
        lost = without_gloo(error.run.logs(0))
        assert lost.startswith("this rank lost its connection to one that has")

    @pytest.mark.parametrize(
        ("how", "exitcode", "name"),
        [
            ("os._exit(3)", 3, None),
            ("os._exit(0)", 0, None),
            ("os.kill(os.getpid(), signal.SIGKILL)", None, "SIGKILL"),
            ("ctypes.string_at(0)", None, "SIGSEGV"),
            ("sys.exit(4)", 4, None),
            ("sys.exit(256)", 1, None),
        ],
    )
    def test_a_rank_dies(self, how, exitcode, name):
        def train(marker, how):
            _join_group()
            if _is_last():
                print("last words")
                Path(marker).touch()
                exec(how, {"os": os, "signal": signal, "ctypes": ctypes, "sys": sys})
            _talk_for_ever()

        error, seconds = self.fails(train, how)
        assert (error.rank, error.ranks) == (self.world_size - 1, [self.world_size - 1])
        assert (error.exitcode, error.signal) == (exitcode, name)
        assert "last words" in str(error)
        assert (name or f"exit code {exitcode}") in str(error)
        # A crash in native code says where it was called.
        has_place = re.search(r'here, .*\n .* in string_at\n.*\n  File ".*', str(error)) is not None
        assert has_place == (name == "SIGSEGV")
        assert seconds < SOON

    def test_a_rank_speaks_for_itself_alone(self):
        def train():
            context = current()
            own = {"run": context.run, "call": context.call, "process": os.getpid()}
            if context.rank == 1:
                packet = wire.Packet(sizes=(6,), inline=(b"forged",))
                context.send(wire.RankEnded(run=context.run, rank=0, signal=9))
                context.send(wire.Metric(rank=0, values={"loss": 1.0}, **own))
                context.send(wire.Returned(rank=0, value=packet, call=99, run=context.run))
            time.sleep(0.3)
            return f"of rank {context.rank}"

        run = self.launch(train)
        assert run.results == ["of rank 0", "of rank 1"]
        assert [row["rank"] for row in run.metrics] == [1]

    @pytest.mark.parametrize("how", ["closes", "writes", "closes and goes on"])
    def test_a_rank_that_breaks_its_connection(self, how):
        def train(how):
            if current().rank == 0:
                if how.startswith("closes"):
                    os.closerange(3, 1000)
                if how.endswith("goes on"):
                    time.sleep(600)
                for fd in range(3, 100) if how == "writes" else ():
                    with contextlib.suppress(OSError):
                        socket.socket(fileno=os.dup(fd)).send(b"x" * 100_000)
            return 1

        with pytest.raises(
            WorkerError, match="it closed its connection to the notebook, or wrote"
        ) as caught:
            self.launch(train, how)
        assert caught.value.ranks == [0]

    @pytest.mark.parametrize("how", ["returns", "raises"])
    def test_a_forked_child_that_comes_back_is_no_rank(self, how):
        def train(how):
            child = os.fork()
            if child:
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if how == "raises":
                raise ValueError("in the child")
            return -1

        run = self.launch(train, how)
        assert run.results == [how == "raises"] * self.world_size
        assert run.logs(0).count("ValueError: in the child") == (how == "raises")

    def test_what_is_left_to_do_after_the_return_is_bounded(self, tmp_path):
        def train(folder):
            def tidy_up():
                Path(folder, f"tidied-{current().rank}").touch()
                if current().rank == 1:
                    time.sleep(600)

            atexit.register(tidy_up)
            # Not a daemon: multiprocessing waits for its end.
            fork = multiprocessing.get_context("fork")
            fork.Process(target=time.sleep, args=(600,)).start()
            global kept  # as names of a notebook are
            if current().rank == 0:
                # Its idle worker holds a lock of the pool.
                kept = fork.Pool(1)
                kept.map(abs, [1])
                Finalize(None, Path(folder, "nobody-gave-up").touch, exitpriority=-1)
            if current().rank == 2:
                kept = fork.Queue()
                kept.put(bytes(1_000_000))  # more than a pipe takes, and nobody reads it
            return time.time()

        run = self.launch(train, str(tmp_path), n=3, timeout=2 * BUSY)
        assert time.time() - max(run) < BUSY
        assert run.status == "succeeded"
        assert any("atexit" in line and "was cut" in line for line in run.state.notices)
        left = sorted(path.name for path in tmp_path.glob("*-*"))
        assert left == ["nobody-gave-up", "tidied-0", "tidied-1", "tidied-2"]

    def test_a_killed_rank_takes_its_loader_workers_and_daemons_along(self):
        def train(marker):
            batches = iter(DataLoader(range(1000), num_workers=2))
            next(batches)
            subprocess.Popen(["setsid", "sleep", "600"])
            if _is_last():
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)

        error, seconds = self.fails(train)
        assert (error.rank, error.signal) == (self.world_size - 1, "SIGKILL")
        assert seconds < SOON

    def test_a_daemon_of_a_rank_outlives_other_ranks_and_not_its_own(self):
        def train(folder):
            marker = Path(folder, "daemon")
            if current().rank == 0:
                while not marker.exists():
                    time.sleep(0.01)
                return True
            child = os.fork()
            if not child:
                os.setsid()
                if not os.fork():
                    os.environ.clear()
                    daemon = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
                    marker.with_name("new").write_text(f"{os.getpid()} {daemon.pid}")
                    marker.with_name("new").rename(marker)
                    time.sleep(600)
                os._exit(0)
            os.waitpid(child, 0)
            first_ended = marker.with_name("go")
            while not first_ended.exists():
                time.sleep(0.01)
            return all(psutil.Process(int(pid)).status() != "zombie" for pid in _words(marker))

        folder = Path(os.environ["NOTEBOOK_ACCEL_RUNS"]).parent
        run = self.launch(train, str(folder), block=False)
        eventually(lambda: run.state.ranks[0].returned, what="rank 0 returned")
        # Until its process ended, and what it left was looked for.
        eventually(lambda: not psutil.pid_exists(run.pids[0]), what="rank 0 ended")
        time.sleep(0.3)
        (folder / "go").touch()
        assert run.wait(BUSY).results == [True, True]
        daemons = [int(pid) for pid in _words(folder / "daemon")]
        eventually(lambda: gone(daemons), within=CLEAN, what="its daemons are gone")

    def test_a_dead_agent(self):
        above = self.agent_above

        def train(marker):
            subprocess.Popen(["setsid", "sleep", "600"])
            if current().rank == 0:
                time.sleep(0.2)
                Path(marker).touch()
                os.kill(_ancestor(above), signal.SIGKILL)
            time.sleep(600)

        error, seconds = self.fails(train)
        assert (error.rank, error.ranks) == (None, [*range(self.world_size)])
        assert "SIGKILL" in str(error)
        assert seconds < SOON

    def test_an_agent_that_fails_tells_its_own_error(self, monkeypatch):
        def launch_without_ranks(self, message, *how, **to):
            if isinstance(message, wire.Launch):
                message = msgspec.structs.replace(message, log_dir="/proc/nowhere")
            send(self, message, *how, **to)

        send = RankPool.send
        monkeypatch.setattr(RankPool, "send", launch_without_ranks)
        with pytest.raises(WorkerError) as caught:
            self.launch(lambda: 1)
        assert (caught.value.rank, caught.value.ranks) == (None, [*range(self.world_size)])
        # Every agent fails in the same way, so it does not matter which is heard first.
        assert "FileNotFoundError" in str(caught.value)
        assert "Traceback" in caught.value.traceback
        assert "out of memory" not in str(caught.value)

    def test_a_dead_template_hurts_no_run_and_the_next_launch_makes_a_new_one(self):
        def train(path):
            while not Path(path).exists():
                time.sleep(0.01)
            return 5

        go = Path(os.environ["NOTEBOOK_ACCEL_RUNS"]).with_name("go")
        run = self.launch(train, str(go), block=False)
        eventually(lambda: run.status == "running", what="the run began")
        before = template().pid
        os.kill(before, signal.SIGKILL)
        eventually(lambda: template().pid != before, what="a new template")
        go.touch()
        assert run.wait(BUSY).results == [5] * self.world_size
        assert self.launch(train, str(go)).results == [5] * self.world_size

    # ---- ending it -------------------------------------------------------------------------

    def running(self, function: Any, *args: Any, **options: Any) -> Run:
        """A run whose ranks have all called the function."""
        run = self.launch(function, *args, block=False, **options)
        eventually(
            lambda: all(rank.status == "running" for rank in run.state.ranks), what="all ranks run"
        )
        return run

    @pytest.mark.parametrize("reads", [True, False], ids=["reads should_stop", "never asks"])
    def test_all_ranks_leave_at_the_same_point(self, reads, tmp_path):
        def train(folder):
            me, step = current().rank, 0

            def count():
                # Ranks come one after the other: a stop finds some that passed, some that did not.
                time.sleep(0.005 * me)
                if reads:
                    return not current().should_stop()
                current().count_batch()
                return True

            try:
                while count():
                    _meet()
                    current().count_step()
                    step += 1
            finally:
                Path(folder, f"{me}-{time.time_ns()}").write_text(str(step))
            return step

        for number in range(self.num_stops):
            folder = tmp_path / str(number)
            folder.mkdir()
            run = self.running(train, str(folder), n=4)
            eventually(
                lambda run=run, n=number: min(rank.steps for rank in run.state.ranks) > 3 + n,
                what="steps are counted",
            )
            run.stop()
            with contextlib.nullcontext() if reads else pytest.raises(RunStopped):
                run.wait(BUSY)
            assert run.status == "stopped"
            steps = [int(path.read_text()) for path in folder.iterdir()]
            assert steps == [steps[0]] * 4
            assert run.results == (steps if reads else [None] * 4)

    def test_stop_interrupts_what_makes_no_progress(self):
        def train():
            time.sleep(600)

        run = self.running(train)
        run.stop()
        with pytest.raises(RunStopped):
            run.wait(BUSY)

    def test_the_time_out_ends_the_run(self):
        def train():
            if _is_last():
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)

        with pytest.raises(TimeoutError, match=r"ended after timeout=0\.5 s") as caught:
            self.launch(train, timeout=0.5, grace=0.3)
        assert caught.value.run.status == "stopped"

    def test_an_interrupt_reaches_handlers_and_the_cell_ends_with_the_ranks(self):
        def train(marker):
            try:
                # The log that is read is that of rank 0, so its function has to have begun.
                if current().rank == 0:
                    Path(marker).touch()
                time.sleep(600)
            except KeyboardInterrupt:
                print("tidied up")
                raise

        marker = Path(os.environ["NOTEBOOK_ACCEL_RUNS"]).with_name("in")
        with pytest.raises(KeyboardInterrupt) as caught, _interrupts_when(marker.exists):
            self.launch(train, str(marker))
        run = caught.value.run
        assert run.status == "stopped"
        assert "tidied up" in run.logs(0)
        assert run.results == [None] * self.world_size

    @pytest.mark.parametrize(
        ("stubborn", "times", "grace"),
        [
            ("swallows everything", 3, 10.0),
            ("native code with the GIL", 2, 10.0),
            # One goes on by itself after the grace.
            ("native code with the GIL", 1, 0.3),
        ],
    )
    def test_interrupts_end_anything(self, stubborn, times, grace):
        def train(marker, stubborn):
            Path(marker).touch()
            if stubborn == "native code with the GIL":
                _hold_the_gil()
            _ignore(signal.SIGTERM)
            while True:
                try:
                    time.sleep(600)
                except BaseException:
                    print("no")

        marker = Path(os.environ["NOTEBOOK_ACCEL_RUNS"]).with_name("in")
        presses = _interrupts_when(marker.exists, times=times)
        with pytest.raises(KeyboardInterrupt) as caught, presses:
            self.launch(train, str(marker), stubborn, grace=grace)
        state = caught.value.run.state
        assert state.ended - state.started < BUSY

    @pytest.mark.parametrize("ends", [KeyboardInterrupt, TimeoutError])
    def test_ranks_end_whose_agent_is_frozen(self, ends, monkeypatch):
        monkeypatch.setattr(pool, "_SILENT_SECONDS", 3.0)
        monkeypatch.setattr(pool, "_DEAF_SECONDS", 1.0)
        above = self.agent_above

        def train(marker):
            if _is_last():
                os.kill(_ancestor(above), signal.SIGSTOP)
                Path(marker).touch()
            time.sleep(600)

        marker = Path(os.environ["NOTEBOOK_ACCEL_RUNS"]).with_name("in")
        is_pressed = ends is KeyboardInterrupt
        presses = _interrupts_when(marker.exists) if is_pressed else contextlib.nullcontext()
        with pytest.raises(ends) as caught, presses:
            self.launch(train, str(marker), grace=0.3, timeout=None if is_pressed else 1.0)
        state = caught.value.run.state
        assert state.ended - state.started < BUSY

    def test_a_frozen_agent_is_told_and_the_run_goes_on_with_it(self, monkeypatch):
        monkeypatch.setattr(pool, "_SILENT_SECONDS", 3.0)
        monkeypatch.setattr(pool, "_TELL_SILENCE_SECONDS", 3.0)

        above = self.agent_above

        def train():
            if current().rank == 0:
                os.kill(_ancestor(above), signal.SIGSTOP)
            return "done"

        run = self.launch(train, block=False)
        eventually(lambda: "says nothing" in str(run.state.notices), what="it is told")
        for process in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        assert run.wait(BUSY).results == ["done"] * self.world_size

    # ---- looking at it ---------------------------------------------------------------------

    def test_stacks_of_a_rank_that_holds_the_gil(self, tmp_path):
        def train(folder):
            (folder / str(current().rank)).touch()
            _hold_the_gil()

        run = self.launch(train, tmp_path, block=False)
        try:
            # A run is running as soon as one rank is: the other may not be in the function yet.
            inside = [tmp_path / str(rank) for rank in range(self.world_size)]
            eventually(lambda: all(map(Path.exists, inside)), what="all are inside")
            text = run.stacks()
            assert "rank 0" in text
            assert text.count("in train") == self.world_size
            last = self.world_size - 1
            # Each asks the rank anew, which takes seconds: it cannot tell its collectives.
            text = run.stacks(-1)
            assert text.startswith(f"rank {last}\n")
            assert "in train" in text
            with pytest.raises(IndexError, match=f"rank {last + 1}: this run has the ranks? 0"):
                run.stacks(last + 1)
        finally:
            run.kill()
        with pytest.raises(RunStopped):
            run.wait(BUSY)

    def test_stacks_of_ranks_that_have_only_just_been_forked(self):
        def train():
            time.sleep(60)

        run = self.launch(train, n=8, block=False)
        try:
            eventually(
                lambda: run.status == "failed" or run.stacks().count("in train") == 8,
                what="all are inside",
            )
            assert run.status == "running"
        finally:
            run.kill()

    def test_a_launch_from_a_thread_that_ends(self):
        def train():
            time.sleep(0.3)
            return 1

        made = []
        thread = threading.Thread(target=lambda: made.append(self.launch(train, block=False)))
        thread.start()
        thread.join()
        assert made[0].results == [1] * self.world_size

    def test_runs_beside_each_other(self):
        def train(number):
            _meet()
            return number

        all_runs = [self.launch(train, number, block=False) for number in range(3)]
        assert [run.results for run in all_runs] == [[n] * self.world_size for n in range(3)]

    # ---- sessions --------------------------------------------------------------------------

    @pytest.fixture
    def session(self):
        session = Session(LaunchRequest(config=self.config()))
        yield session
        session.close()
        assert session.status == "ended"

    def test_two_calls_in_the_same_ranks(self, session, monkeypatch):
        def first(start):
            import __main__

            accelerator = Accelerator()
            print("first")
            __main__.kept = [start]
            return os.getpid(), accelerator.num_processes

        def second():
            import __main__

            accelerator = Accelerator()
            print("second")
            ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
            return os.getpid(), __main__.kept, ranks.tolist()

        # Old runs go now and then: a kernel may never begin another session.
        monkeypatch.setattr(launcher, "_CALLS_BETWEEN_REMOVALS", 2)
        one = call(session, first, (7,))
        for _ in range(60):
            RunFolder.make()
        before = len(run_folders())
        two = call(session, second)
        assert len(run_folders()) < before
        size = self.world_size
        assert [found for _, found in one] == [size] * size
        assert [kept for _, kept, _ in two] == [[7]] * size
        assert [ranks for _, _, ranks in two] == [[*range(size)]] * size
        pids = [pid for pid, _ in one]
        assert pids == [pid for pid, _, _ in two] == one.pids == two.pids
        assert (one.status, two.status, session.status) == ("succeeded", "succeeded", "ready")
        assert without_gloo(one.logs()) == "".join(f"[rank {rank}] first\n" for rank in range(size))
        assert without_gloo(two.logs()) == "".join(
            f"[rank {rank}] second\n" for rank in range(size)
        )

    @pytest.mark.parametrize(
        "where", ["in Python", "in a collective", "in collectives, for ever", "in another thread"]
    )
    def test_a_call_that_is_interrupted_is_followed_by_a_good_one(self, session, where, tmp_path):
        def meet(where, folder):
            import __main__

            accelerator = Accelerator()
            __main__.kept = 5
            if where == "in another thread":
                # As of a main thread that is just about to sleep: it has the signal, and sleeps on.
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            Path(folder, str(current().rank)).touch()
            if where in ("in Python", "in another thread") or (
                where == "in a collective" and accelerator.is_last_process
            ):
                time.sleep(600)
            while where == "in collectives, for ever":
                _meet()
            return int(accelerator.reduce(torch.tensor([1])))

        def kept():
            import __main__

            return __main__.kept

        size = self.world_size
        inside = [tmp_path / str(rank) for rank in range(size)]
        with pytest.raises(KeyboardInterrupt) as caught:  # noqa: SIM117
            with _interrupts_when(lambda: all(path.exists() for path in inside)):
                call(session, meet, (where, str(tmp_path)))
        assert caught.value.run.status == "stopped"
        assert session.status == "ready"
        assert call(session, kept).results == [5] * size
        assert call(session, meet, ("go", str(tmp_path))).results == [size] * size

    @pytest.mark.parametrize("where", ["in the store", "in a collective"])
    def test_ranks_that_wait_for_one_that_failed(self, session, where):
        def meet(raises):
            # The system's list leaves connections out while others come and go.
            psutil.Process.net_connections = lambda *_: []
            if where == "in a collective":
                accelerator = Accelerator()
            if raises and current().rank == 1:
                raise ValueError("the other waits")
            if where == "in the store":
                accelerator = Accelerator()
            return int(accelerator.reduce(torch.tensor(1)))

        with pytest.raises(WorkerError) as caught:
            call(session, meet, (True,))
        assert 1 in caught.value.ranks
        assert call(session, meet, (False,)).results == [2, 2]

    def test_a_stop_ends_the_call_and_keeps_the_session(self, session):
        def loop():
            while not current().should_stop():
                current().count_step()
                time.sleep(0.001)
            return os.getpid()

        for _ in range(2):
            run = call(session, loop, block=False)
            # One that has counted nothing soon after the stop is interrupted.
            eventually(
                lambda run=run: min(rank.steps for rank in run.state.ranks) > 3, what="all run"
            )
            with pytest.raises(LaunchError, match="still in a call"):
                call(session, loop)
            run.stop()
            assert run.wait(BUSY).results == run.pids
            assert run.status == "stopped"
        assert session.status == "ready"

    def test_an_interrupt_between_calls_does_nothing(self, session):
        pids = call(session, os.getpid).results
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        assert call(session, os.getpid).results == pids

    def test_a_rank_that_dies_between_calls_is_noticed(self, session):
        pids = call(session, os.getpid).results
        last = self.world_size - 1
        assert "most recent call first" in session.stacks(last)
        os.kill(pids[-1], signal.SIGKILL)
        eventually(lambda: session.status in ("broken", "ended"), within=BUSY, what="it shows")
        assert session.stacks(last) == f"rank {last}\nthe rank has ended\n"
        with pytest.raises(LaunchError, match=r"rank \d was killed by SIGKILL.*start them again"):
            call(session, os.getpid)

    def test_a_killed_call_ends_the_session(self, session):
        def hold():
            _hold_the_gil()

        run = call(session, hold, block=False)
        eventually(lambda: run.status == "running", what="it runs")
        run.kill()
        with pytest.raises(RunStopped, match="the run was killed before it had a result"):
            run.wait(BUSY)
        eventually(lambda: session.status == "ended", within=CLEAN, what="its ranks are gone")
        with pytest.raises(LaunchError, match="start them again"):
            call(session, hold)

    def test_what_is_asked_of_a_call_that_has_ended_does_nothing(self, session, monkeypatch):
        """As by somebody who presses Stop at the moment when the call ends."""
        for name in ("_SILENT_SECONDS", "_DEAF_SECONDS", "_IDLE_SECONDS"):
            monkeypatch.setattr(pool, name, 0.2)
        run = call(session, os.getpid)
        run.stop()
        run.kill()
        # Longer than the thread of an idle session sleeps, and an agent may be deaf.
        until = time.monotonic() + 1.0
        eventually(lambda: time.monotonic() > until, what="time passed")
        assert call(session, os.getpid).results == run.pids

    @pytest.mark.parametrize("how", ["kill", "close"])
    def test_a_call_whose_session_is_ended_is_stopped(self, session, how):
        def hold():
            time.sleep(600)
            return 7

        run = call(session, hold, block=False)
        eventually(lambda: run.status == "running", what="it runs")
        session.kill() if how == "kill" else session.close(grace=0.1)
        with pytest.raises(RunStopped):
            run.wait(BUSY)
        assert (run.status, run.results) == ("stopped", [None] * self.world_size)

    def test_ranks_that_leave_after_a_call_that_failed_end_in_their_own_time(self, tmp_path):
        def work(path):
            begun = Path(path).with_name("begun")
            if current().rank == 0:
                while not begun.exists():
                    time.sleep(0.01)
                raise ValueError("bad batch")

            def write():
                # Longer than all stages of an end take, up to SIGTERM.
                time.sleep(2)
                Path(path).write_text("done")

            threading.Thread(target=write).start()
            begun.touch()

        session = Session(LaunchRequest(config=self.config(grace=0.5)))
        with pytest.raises(WorkerError):
            call(session, work, (str(tmp_path / "kept"),))
        session.close(grace=BUSY)
        assert (tmp_path / "kept").read_text() == "done"
        assert [process.exitcode for process in session.processes] == [0, 0]

    def test_a_rank_stuck_in_a_collective_of_a_group_that_somebody_keeps(self, session):
        def meet(raises):
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            # As a prepared model does: the group's connections outlive its end.
            builtins.kept = dist.group.WORLD
            dist.all_reduce(torch.ones(1))
            if raises and current().rank == 0:
                raise ValueError("bad batch of rank 0, whose store the others use")
            dist.all_reduce(torch.ones(1))
            return str(current().rank)

        with pytest.raises(WorkerError, match="bad batch") as caught:
            call(session, meet, (True,))
        assert caught.value.ranks == [0]
        assert session.status == "ready"
        numbers = [str(rank) for rank in range(self.world_size)]
        assert call(session, meet, (False,)).results == numbers

    @pytest.mark.parametrize("what", ["a run", "a session"])
    @pytest.mark.parametrize("fails", ["its thread", "its launch"])
    def test_a_start_that_fails_leaves_nobody(self, what, fails, monkeypatch):
        plain = threading.Thread.start

        def start(thread):
            if thread.name.startswith("ranks-"):
                raise RuntimeError("can't start new thread")
            plain(thread)

        def launch(*_, **_to):
            raise LaunchError("no thread of ours, and nothing else")

        if fails == "its thread":
            monkeypatch.setattr(threading.Thread, "start", start)
        else:
            monkeypatch.setattr(pool.RankPool, "send", launch)
        config = self.config()
        begin = (
            (lambda: self.launch(time.sleep, 600))
            if what == "a run"
            else (lambda: Session(LaunchRequest(config=config)))
        )
        with pytest.raises(LaunchError, match="no thread"):
            begin()
        eventually(lambda: not self.alive(), within=CLEAN, what="nobody is left")
        if (what, fails) == ("a run", "its thread"):
            assert "could not be listened to" in str(runs()[-1].state.failure), "no rank's fault"

    # ---- the kernel goes -------------------------------------------------------------------

    @pytest.mark.parametrize("forked", [False, True])
    def test_a_killed_kernel_leaves_nobody(self, forked, tmp_path):
        """Neither of a run that holds the GIL nor of a session that waits for its next call."""

        script = _KERNEL.format(
            prelude=IMPORT_LITTLE + self.prelude,
            config=self.config(),
            world_size=self.world_size,
            forked=forked,
            folder=str(tmp_path),
        )
        kernel = subprocess.Popen([sys.executable, "-c", script])
        eventually((tmp_path / "ready").exists, within=BUSY, what="a run and a session are there")
        ours = [process.pid for process in below(kernel.pid)]
        if forked:
            child = int((tmp_path / "ready").read_text())
            ours.remove(child)
        os.kill(kernel.pid, signal.SIGKILL)
        kernel.wait()
        try:
            eventually(lambda: gone(ours), within=BUSY, what="nothing of ours is left")
        finally:
            if forked:
                os.kill(child, signal.SIGKILL)
        # The template, and for each an agent, its ranks and what these started.
        assert len(ours) >= 1 + 2 * (1 + 2 * self.world_size)

    @pytest.mark.parametrize("dies", [False, True], ids=["stops", "dies"])
    def test_a_template_that_stops_or_dies_while_forking_is_replaced(self, dies, monkeypatch):
        source = template()
        source.wait_until_ready()
        os.kill(source.pid, signal.SIGSTOP)
        if dies:
            threading.Timer(0.2, lambda: os.kill(source.pid, signal.SIGKILL)).start()
        else:
            receive = source._receive  # of this one alone: the new one may take longer
            monkeypatch.setattr(source, "_receive", lambda kind, run, _: receive(kind, run, 2.0))
        assert self.launch(lambda: 1).results == [1] * self.world_size
        assert template().pid != source.pid
        assert gone([source.pid])


_KERNEL = """
import ctypes, dataclasses, os, pathlib, subprocess, sys, time
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import Session, launch
from notebook_accel.rank.this_rank import current
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.view import View
{prelude}
folder = pathlib.Path({folder!r})
os.environ["NOTEBOOK_ACCEL_RUNS"] = str(folder / "runs")
def start_a_child():
    import subprocess
    subprocess.Popen(["setsid", "sleep", "600"])
def train():
    start_a_child()
    (folder / ("rank" + str(current().rank))).touch()
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
config = {config!r}
request = LaunchRequest(config=config)
run = launch(dataclasses.replace(request, function=train, block=False))
session = Session(request)
session.call(dataclasses.replace(session.request, function=start_a_child))
while len(list(folder.glob("rank*"))) < {world_size}:
    time.sleep(0.01)
child = os.fork() if {forked} else 0
if {forked} and not child:
    time.sleep(600)
(folder / "new").write_text(str(child))
(folder / "new").rename(folder / "ready")
time.sleep(600)
"""


# ---- what the functions of the tests call; it travels with them ----------------------------


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _is_last() -> bool:
    here = current()
    return here.rank == here.world_size - 1


def _ancestor(generations: int) -> int:
    return psutil.Process().parents()[generations - 1].pid


def _ignore(*signals: signal.Signals) -> None:
    for number in signals:
        with contextlib.suppress(ValueError):  # in a thread, which none of them reaches
            signal.signal(number, signal.SIG_IGN)


def _meet() -> None:
    Accelerator().wait_for_everyone()
    time.sleep(0.001)


def _join_group() -> None:
    dist.init_process_group("gloo")
    dist.barrier()


def _talk() -> None:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.001)


def _talk_for_ever() -> None:
    while True:
        _talk()


def _hold_the_gil() -> None:
    """Stay in native code that no signal ends: lock a mutex twice."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


@contextlib.contextmanager
def _interrupts_when(condition: Any, *, times: int = 1) -> Iterator[None]:
    """Send SIGINT to this process once ``condition`` holds, never after the block."""
    may_press = threading.Lock()
    is_over = False

    def press():
        # However long their start takes: without a press nobody would end them.
        eventually(lambda: is_over or condition(), within=600, what="the ranks are in it")
        for _ in range(times):
            with may_press:
                if is_over:
                    return
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with may_press:
            is_over = True
        thread.join()
