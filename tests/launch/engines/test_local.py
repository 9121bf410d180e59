"""The local engine: how many ranks there are, and how the kernel holds the agent that it forked."""

import contextlib
import os
import signal
import subprocess
import threading
from types import SimpleNamespace
from unittest.mock import Mock
from uuid import uuid4

import pytest

from notebook_accel import wire
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError
from notebook_accel.launch.engines import RankPlan, local
from notebook_accel.launch.engines.local import LocalEngine
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.rank_environment import ON_CPU, WITHOUT_DEVICES
from notebook_accel.launch.view import View
from notebook_accel.system import processes
from tests.engines.processes import gone
from tests.waiting import eventually

SECONDS = 60.0


class Slow(View):
    """Keeps the names of what is slow to launch."""

    def __init__(self):
        self.names = []

    def launch_is_slow(self, name, importing=""):
        self.names.append(importing or name)


def request(view=None, **settings):
    return LaunchRequest(
        name="train",
        config=LaunchConfig(**settings),
        environment=dict(os.environ),
        view=view or View(),
    )


@pytest.fixture(name="devices")
def _devices(monkeypatch):
    """Let the machine have so many accelerators, of which it says more by other fields."""

    def have(number, **more):
        kind, names = "cuda" if number else "cpu", ("accelerator",) * number
        found = wire.Devices(kind=kind, names=names, **more)
        counted = SimpleNamespace(count_devices=lambda _: found)
        monkeypatch.setattr(local, "ask_template", lambda _, question: question(counted))

    return have


# ---- how many ranks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "settings", "world_size"),
    [
        (4, {}, 4),
        (4, {"num_processes": 2}, 2),
        (2, {"devices": [3, 1]}, 2),
        (2, {"num_processes": 5, "backend": "gloo"}, 5),
        (0, {}, 1),
        (0, {"num_processes": 3}, 3),
    ],
)
def test_a_rank_an_accelerator_unless_a_number_is_asked_for(
    available, settings, world_size, devices
):
    devices(available)
    plan = LocalEngine().plan_ranks(request(**settings))
    assert plan.world_size == world_size
    assert len(plan.agents) == 1
    assert dict(plan.environment) == ({} if available else ON_CPU)


def test_a_machine_without_accelerators_says_how_to_get_more_ranks(devices):
    devices(0)
    (notice,) = LocalEngine().plan_ranks(request()).notices
    assert "num_processes=2" in notice
    assert "%%accelerate -n 2" in notice
    assert LocalEngine().plan_ranks(request(num_processes=1)).notices == ()


def test_what_the_machine_says_goes_to_the_person_and_to_the_ranks(devices, monkeypatch):
    devices(0, problem="the driver is too old")
    plan = LocalEngine().plan_ranks(request(num_processes=2))
    assert plan.notices == ("torch can use no accelerator: the driver is too old",)
    devices(2)
    needed = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    monkeypatch.setattr(local, "_VARIABLES", {"cuda": lambda *_: needed})
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    assert LocalEngine().plan_ranks(request()).environment == {"NCCL_P2P_DISABLE": "1"}


def test_with_the_cpu_chosen_nobody_counts_and_ranks_see_none(monkeypatch):
    monkeypatch.setattr(local, "ask_template", None)
    plan = LocalEngine().plan_ranks(request(devices="cpu", num_processes=2))
    assert plan == RankPlan.of_sizes(2, environment=WITHOUT_DEVICES)


@pytest.mark.parametrize(
    ("available", "settings", "message"),
    [
        (2, {"num_processes": 3}, r"num_processes=3, but this machine has 2"),
        (1, {"devices": [0, 1]}, r"devices=\[0, 1\], but of these the machine has 1"),
        (0, {"devices": [0]}, r"devices=\[0\], but of these the machine has none"),
    ],
)
def test_more_than_there_are(available, settings, message, devices):
    devices(available)
    with pytest.raises(ConfigError, match=message):
        LocalEngine().plan_ranks(request(**settings))


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_wait_for_the_template_is_shown(is_ready, monkeypatch):
    source, view = Mock(is_ready=is_ready), Slow()
    source.imports.side_effect = [wire.Imports(importing=name) for name in ("timm", "timm", "")]
    monkeypatch.setattr(local, "ask_template", lambda _, question: question(source))
    LocalEngine().warm_up(request(view))
    assert view.names == [*["train"][is_ready:], "timm"]
    assert source.wait_until_ready.called


# ---- the agent -----------------------------------------------------------------------------


def test_the_number_of_an_agent_that_has_ended_may_be_another_s():
    ended = SimpleNamespace(exit_of=lambda pid, timeout: wire.AgentExited(pid=pid, exitcode=0))
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            local._end(ended, other.pid, uuid4().hex)
            assert not gone([other.pid])
        finally:
            other.kill()


def test_what_began_in_the_session_of_an_agent_is_ended_also_where_that_dies_late(monkeypatch):
    lives = SimpleNamespace(exit_of=lambda pid, timeout: None)
    with subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; exec sleep 600"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as agent:
        orphan = int(agent.stdout.readline())
        late = threading.Timer(0.1, agent.kill)
        monkeypatch.setattr(processes, "kill_tree", lambda _: late.start())
        monkeypatch.setattr(local, "_KILLED_SECONDS", SECONDS)
        try:
            local._end(lives, agent.pid, uuid4().hex)
            eventually(lambda: gone([orphan]), what="the orphan is gone")
        finally:
            late.join()
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
