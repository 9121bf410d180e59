"""The template's own process: what it forks, what it says of those that end, what it keeps."""

import errno
import os
import signal
import socket
import threading
from unittest.mock import Mock
from uuid import uuid4

import psutil
import pytest

from notebook_accel import wire
from notebook_accel.launch.template import handle, process
from notebook_accel.launch.template.handle import Template, template
from notebook_accel.launch.transport.channel import Channel
from tests.descriptors import open_descriptors
from tests.engines.processes import gone
from tests.launch.agents import SECONDS, agent_by_hand
from tests.templates import import_little
from tests.waiting import eventually


@pytest.fixture(name="source")
def _source():
    """The template of this process, ready."""
    source = template()
    source.wait_until_ready()
    return source


def num_descriptors(source):
    return psutil.Process(source.pid).num_fds()


def test_an_agent_that_was_killed_is_reaped_and_reported(source, tmp_path):
    before = num_descriptors(source)
    with agent_by_hand(tmp_path) as agent:
        agent.launch(2)
        os.kill(agent.pid, signal.SIGKILL)
        exited = source.exit_of(agent.pid, timeout=SECONDS)
    assert exited.exitcode == -signal.SIGKILL
    # Nothing of it is kept that told of its end.
    eventually(lambda: num_descriptors(source) <= before, what="its descriptors are closed")


def test_agents_inherit_nothing_of_each_other(source, tmp_path):
    soft, hard = psutil.Process(source.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard, "there is room for many of them"
    # Agents close what is the template's as they begin.
    with agent_by_hand(tmp_path) as alone:
        alone.launch(1)
        found = psutil.Process(alone.pid).num_fds()
    with agent_by_hand(tmp_path), agent_by_hand(tmp_path), agent_by_hand(tmp_path) as third:
        third.launch(1)
        # An agent has one more for the instant in which it reads how much its ranks use.
        eventually(lambda: psutil.Process(third.pid).num_fds() <= found, what="no more than alone")


def test_devices_are_counted_in_a_child_of_which_nothing_is_left(source):
    before = num_descriptors(source)
    children = {child.pid for child in psutil.Process(source.pid).children()}
    # A variable that nobody asked with before: answers are kept by those that choose devices.
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VISIBLE_OF_A_TEST": uuid4().hex}
    assert source.count_devices(hidden).kind == "cpu"
    left = {child.pid for child in psutil.Process(source.pid).children()}
    assert left <= children
    assert num_descriptors(source) <= before


def test_one_that_is_let_go_of_stays_until_its_last_agent_has_ended(monkeypatch):
    monkeypatch.setattr(handle, "_BOOT", handle._BOOT)
    import_little()
    source = Template(os.environ)
    source.wait_until_ready()
    ours, theirs = socket.socketpair()
    with theirs:
        pid = source.fork_agent(theirs, run=uuid4().hex)
    agent = Channel(ours)
    source.close()
    # The agent still serves its run, whose first message it waits for, and the template with it.
    assert psutil.Process(pid).ppid() == source.pid
    agent.send(wire.Alive())
    agent.close()
    eventually(lambda: gone([pid, source.pid]), what="both are gone")


@pytest.mark.parametrize("refused", ["fork", "pidfd_open"])
def test_what_the_system_refuses_a_fork_is_told_and_ends_nothing(refused, monkeypatch):
    ours, theirs = socket.socketpair()
    watched, kept = os.pipe()
    kernel, server = Channel(ours), process.Server(Channel(theirs), kernel=watched)
    serving = threading.Thread(target=server.run)
    # What is asked, with its descriptors, and the type of the answer.
    asked = [(wire.ForkAgent(run="r"), [0], wire.Forked)]
    if refused != "pidfd_open":  # that one is for agents alone
        asked.append((wire.CountDevices(run="r", environment={}), [], wire.Devices))
    serving.start()
    before = open_descriptors()
    children = {child.pid for child in psutil.Process().children()}
    full = OSError(errno.EAGAIN, "no more of them")
    monkeypatch.setattr(os, refused, Mock(side_effect=full))
    for message, fds, kind in asked:
        kernel.send(message, fds)
        said, _ = kernel.receive()
        assert isinstance(said, kind)
        assert "no more of them" in said.error
    assert {child.pid for child in psutil.Process().children()} <= children
    assert not open_descriptors() - before
    # A kernel that has let go of it meanwhile, as after an interrupt, ends nothing either.
    for message, fds, _ in asked:
        kernel.send(message, fds)
    kernel.close()
    serving.join(SECONDS)
    assert not serving.is_alive()
    os.close(watched)
    os.close(kept)
