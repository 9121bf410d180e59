"""A template that does not answer: a launch gets a new one, within a bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launch import wire
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.template import handle
from notebook_accel.launch.template.handle import Template, template
from notebook_accel.launch.view import View
from tests.engines.processes import eventually, gone
from tests.templates import IMPORT_LITTLE, import_little

if TYPE_CHECKING:
    from collections.abc import Iterator

# A new template imports torch, on a busy machine.
SOON = 40.0
LOOK_SECONDS = handle._LOOK_SECONDS


@pytest.fixture(scope="module", autouse=True)
def _light() -> Iterator[None]:
    """Templates here are made to be ended: each imports no more than it needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "_BOOT", handle._BOOT)
        import_little()
        yield
    # What comes after this file gets a whole one.
    handle._close_all()


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped one is found within 0.2 s, not one: nothing here lets it go on."""
    monkeypatch.setattr(handle, "_LOOK_SECONDS", LOOK_SECONDS / 5)


@pytest.fixture
def ready() -> Iterator[Template]:
    """The template of this process, ready; afterwards it is no more, however it was left."""
    source = template()
    source.wait_until_ready()
    yield source
    eventually(lambda: gone([source.pid]), within=SOON, what="the old template is gone")


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    is_stopped = psutil.Process(pid).status
    eventually(lambda: is_stopped() == psutil.STATUS_STOPPED, within=SOON, what="it is stopped")


def a_launch(number: int = 1) -> list[Any]:
    config = LaunchConfig(num_processes=2, devices="cpu")
    return launch(lambda: number, config=config, view=View()).results


def test_a_template_that_is_stopped_while_it_imports_is_replaced() -> None:
    source = Template(os.environ)
    stop(source.pid)
    with pytest.raises(handle.UnresponsiveTemplateError, match="stopped"):
        source.wait_until_ready()
    assert gone([source.pid])
    # Another thread, which waited for its turn to ask, is told the same: it asks a new one, too.
    assert source.is_ready
    with pytest.raises(handle.UnresponsiveTemplateError):
        source.wait_until_ready()


def test_devices_are_counted_by_a_new_template_where_the_first_is_stopped(ready: Template) -> None:
    stop(ready.pid)
    launched = launch(lambda: 1, config=LaunchConfig(num_processes=1), view=View())
    assert launched.results == [1]
    assert template().pid != ready.pid


def test_a_template_that_answers_garbage_is_replaced(ready: Template) -> None:
    assert ready._channel is not None
    # As if half a frame had been lost: what follows is read as another length.
    ready._channel._incoming += b"garbage that is no frame"
    assert a_launch() == [1, 1]
    assert template().pid != ready.pid


def test_a_template_whose_answer_is_lost_is_replaced(
    ready: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "_FORK_SECONDS", 0.5)
    # A length that more bytes are waited for than will ever come.
    assert ready._channel is not None
    ready._channel._incoming += b"\x00\x10\x00\x00\x00"
    began = time.monotonic()
    assert a_launch() == [1, 1]
    assert time.monotonic() - began < SOON


def test_runs_go_on_when_their_stopped_template_is_replaced(ready: Template, tmp_path: Any) -> None:
    go = tmp_path / "go"

    def wait_for(path: Any) -> int:
        while not path.exists():
            time.sleep(0.01)
        return 7

    config = LaunchConfig(num_processes=2, devices="cpu")
    run = launch(wait_for, (go,), config=config, view=View(), block=False)
    eventually(lambda: run.status == "running", within=SOON, what="it runs")
    stop(ready.pid)
    began = time.monotonic()
    assert a_launch() == [1, 1]
    assert time.monotonic() - began < SOON
    assert template().pid != ready.pid
    go.touch()
    assert run.wait(SOON).results == [7, 7]


def test_one_that_never_answers_is_told(monkeypatch: pytest.MonkeyPatch, ready: Template) -> None:
    is_ready = Template._ready

    def stopped(self: Template) -> Any:
        # The first has been ready for long; the second has yet to import.
        stop(self.pid)
        return is_ready(self)

    monkeypatch.setattr(Template, "_ready", stopped)
    with pytest.raises(handle.UnresponsiveTemplateError, match="Launch again"):
        a_launch()
    monkeypatch.setattr(Template, "_ready", is_ready)
    assert a_launch() == [1, 1]


@pytest.mark.timeout(4 * SOON)
def test_launches_of_two_threads_with_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs a template of its own; none takes away the one that the other waits for."""
    results: dict[int, Any] = {}

    def launch_one(number: int) -> None:
        try:
            environment = {"OMP_OF_A_TEST": f"test-{number}"}
            config = LaunchConfig(num_processes=1, devices="cpu", env=environment)
            run = launch(lambda: os.environ["OMP_OF_A_TEST"], config=config, view=View())
            results[number] = run.results
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=launch_one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)  # the second comes while the first waits for the imports
    for thread in threads:
        thread.join(3 * SOON)
    assert results == {number: [f"test-{number}"] for number in range(2)}
    assert a_launch() == [1, 1]
    assert list(handle._templates.values()) == [template()]


# The template is made by a thread that ends: it has another parent then, of the same process. The
# pids are told once the system has ended that thread, which may be a moment after its join: its end
# wakes the template, which must not be stopped yet.
_KERNEL = """
import os, sys, threading, time
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.launcher import launch
from notebook_accel.launch.template.handle import template
from notebook_accel.launch.view import View

def begin():
    config = LaunchConfig(num_processes=1, devices="cpu")
    run = launch(time.sleep, (1000,), config=config, view=View(), block=False)
    while run.status != "running":
        time.sleep(0.01)
    pids.extend([template().pid, *run.pids])

pids = []
thread = threading.Thread(target=begin)
thread.start()
thread.join()
while os.path.exists(f"/proc/self/task/{thread.native_id}"):
    time.sleep(0.01)
print(*pids, flush=True)
time.sleep(1000)
"""


def test_a_stopped_template_and_agent_end_with_a_kernel_that_is_killed() -> None:
    command = [sys.executable, "-c", IMPORT_LITTLE + _KERNEL]
    kernel = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert kernel.stdout is not None
        of_template, rank = map(int, kernel.stdout.readline().split())
        agent = psutil.Process(rank).ppid()
        assert psutil.Process(agent).ppid() == of_template
        stop(agent)
        stop(of_template)
    finally:
        kernel.kill()
        kernel.wait()
    eventually(lambda: gone([of_template, agent, rank]), within=SOON, what="all are gone")


def test_one_that_is_paused_goes_on_and_one_that_is_let_go_of_while_stopped_is_ended(
    ready: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "_LOOK_SECONDS", LOOK_SECONDS)
    stop(ready.pid)
    threading.Timer(0.3, lambda: os.kill(ready.pid, signal.SIGCONT)).start()
    answer = ready._ask(
        wire.CountDevices(run="a", environment=dict(os.environ)), wire.Devices, seconds=SOON
    )
    assert answer.kind
    stop(ready.pid)
    ready.close()
    eventually(lambda: gone([ready.pid]), within=SOON, what="it is gone")
