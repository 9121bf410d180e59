"""The engine for a debugger: one rank, in this process, on this process's own objects."""

import os
import random
import re
import signal
import sys
import threading
import traceback

import numpy as np
import pytest
import torch

from notebook_accel import RunStopped, WorkerError, notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.run import call_of
from notebook_accel.launch.run_list import runs
from notebook_accel.launch.view import View
from tests.engines.processes import below
from tests.interpreters import run_script
from tests.launches import launch, without_gloo
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _changes_nothing():
    before, threads, processes = _surroundings(), {*threading.enumerate()}, {*below(os.getpid())}
    yield
    assert _surroundings() == before
    # Those of the tests before may end meanwhile, and have helpers for a moment.
    eventually(lambda: {*threading.enumerate()} <= threads, what="no thread is left")
    eventually(lambda: {*below(os.getpid())} <= processes, what="no process is left")


def _surroundings():
    return {**os.environ, "PYTEST_CURRENT_TEST": ""}, os.getcwd()


class Recorded(View):
    """Notes what it was asked for."""

    def __init__(self):
        self.calls = []

    def launch_failed(self):
        self.calls.append("launch_failed")

    def open(self, run):
        self.calls.append("open")

    def close(self, state):
        self.calls.append(f"close {state.status}")

    def print_end(self):
        self.calls.append("settle")


def inline(function, *args, view=None, **options):
    settings = options.pop("settings", {})
    config = LaunchConfig(engine="inline", **settings)
    return launch(function, args, config=config, view=view or View(), **options)


# ---- results -------------------------------------------------------------------------------


def test_it_returns_what_the_function_returned_and_not_a_copy():
    model = []

    def train(number, *, more):
        model.append(number + more)
        return model

    view = Recorded()
    run = inline(train, 1, view=view, kwargs={"more": 2})
    assert run[0] is model
    assert model == [3]
    assert (run.results, len(run), run.status, run.pids) == ([[3]], 1, "succeeded", [os.getpid()])
    assert run.wait(0) is run
    assert run in runs()
    assert view.calls[:3] == ["open", "close succeeded", "settle"]
    assert run[np.int64(-1)] is model
    with pytest.raises(IndexError):
        run[1]


def test_the_seed_is_that_of_the_function():
    def draw():
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def seed(number):
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    seed(7)
    of_ranks = draw()
    seed(8)
    draw()
    goes_on = draw()
    seed(8)
    draw()
    assert inline(draw, settings={"seed": 7})[0] == of_ranks
    assert draw() == goes_on, "the notebook itself is not seeded"


def test_its_stack_is_that_of_the_cell():
    def look():
        return runs()[-1].stacks(-1)

    run = inline(look)
    assert run[0] == (
        "rank 0\nit runs in the notebook's own process: its stack is that of the cell\n"
    )
    assert run.stacks() == "rank 0\nthe rank has ended\n"
    with pytest.raises(IndexError, match="rank 1: this run has the ranks 0 to 0"):
        run.stacks(1)


# ---- errors --------------------------------------------------------------------------------


def test_an_exception_is_the_cause_itself():
    error = KeyError("missing")

    def train():
        raise error

    with pytest.raises(WorkerError) as caught:
        inline(train)
    assert caught.value.__cause__ is error
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "train"
    assert (caught.value.rank, caught.value.ranks, caught.value.exitcode) == (0, [0], 1)
    assert "rank 0 failed: KeyError: 'missing'" in str(caught.value)
    assert "raise error" in caught.value.traceback
    # The frames that lead to the user's function are ours and of no use.
    assert "engines/inline.py" not in caught.value.traceback
    run = caught.value.run
    assert (run.status, run.results) == ("failed", [None])
    assert "missing" in run.state.error
    with pytest.raises(WorkerError):
        run.wait()


def test_sys_exit_zero_is_success_and_any_other_exit_a_failure():
    assert inline(sys.exit, 0).results == [None]
    for code, exitcode in ((4, 4), ("no more", 1), (256, 1), (np.zeros(2), 1)):
        with pytest.raises(WorkerError, match=re.escape(str(code))) as caught:
            inline(sys.exit, code)
        assert caught.value.exitcode == exitcode
        left = runs()[-1]
        assert call_of(left).folder.load() == left.state, "what is saved can be loaded"


def test_an_interrupt_stays_one():
    def train():
        raise KeyboardInterrupt

    view = Recorded()
    with pytest.raises(KeyboardInterrupt) as caught:
        inline(train, view=view)
    run = caught.value.run
    assert run.status == "stopped"
    assert run is runs()[-1]
    assert run.results == [None]
    assert view.calls == ["open", "close stopped", "settle"]
    with pytest.raises(RunStopped):
        run.wait(0)


def test_an_interrupt_before_the_call_stops_the_run():
    class Interrupting(Recorded):
        def open(self, run):
            super().open(run)
            signal.raise_signal(signal.SIGINT)

    view = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        inline(lambda: 1, view=view)
    left = runs()[-1]
    assert (left.status, call_of(left).folder.load()) == ("stopped", left.state)
    assert view.calls == ["open", "close stopped"]


# ---- a world of one ------------------------------------------------------------------------


def test_the_environment_is_that_of_a_rank_for_the_time_of_the_call(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    ours = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true", "MINE": "1"}
    expected = {**ranks, **ours, "MASTER_ADDR": "127.0.0.1"}

    def train():
        os.environ["LEFT_BEHIND"] = "1"
        return {name: os.environ.get(name) for name in expected}

    settings = {"mixed_precision": "bf16", "devices": "cpu", "env": {"MINE": "1"}}
    assert inline(train, settings=settings)[0] == expected
    assert "LEFT_BEHIND" not in os.environ
    assert os.environ["RANK"] == "7"


def test_arguments_that_the_engine_does_not_use_are_named_in_one_line():
    given = {"timeout": 5.0, "grace": 3.0, "rdzv_id": "x", "master_addr": "1.2.3.4"}
    run = notebook_launcher(lambda: 1, engine="inline", view="none", block=False, **given)
    (line,) = run.state.notices
    assert all(name in line for name in (*given, "block", "engine='inline'"))
    unknown = {"num_processes", "mixed_precision", "use_port", "env", "debug"}
    assert not [name for name in unknown if name in line]
    assert notebook_launcher(lambda: 1, engine="inline", view="none").state.notices == ()
    run = notebook_launcher(lambda: 1, engine="inline", view="none", config={"grace": 3.0})
    assert run.state.notices[0].startswith("grace is not used by engine='inline'")


_TWICE = """
import torch
import torch.distributed as dist
from notebook_accel import Accelerator
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.launch_request import LaunchRequest

def plain():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)

def train():
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    return accelerator.num_processes, accelerator.device.type, accelerator.is_main_process

config = LaunchConfig(engine="inline", devices="cpu")
for function in (plain, plain, train, train):
    print(launch(LaunchRequest(function=function, config=config))[0])
"""


def test_a_process_group_and_an_accelerator_inside_work_twice():
    """In a process of its own: torch's threads end with the interpreter."""
    assert without_gloo(run_script(_TWICE)).splitlines() == ["1.0"] * 2 + ["(1, 'cpu', True)"] * 2
