"""A template that does not answer: a launch gets a new one, within a bounded time."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from notebook_accel import wire
from notebook_accel.errors import LaunchError
from notebook_accel.launch.template import handle
from notebook_accel.launch.template.handle import Template, template
from tests.engines.processes import gone
from tests.launches import on_cpu
from tests.templates import import_little
from tests.waiting import eventually

# A new template imports torch, which with thirty processes on a core takes half a minute.
SOON = 90.0


@pytest.fixture(scope="module", autouse=True)
def _light():
    """Templates here are made to be ended: each imports no more than it needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "_BOOT", handle._BOOT)
        import_little()
        yield
    # What comes after this file gets a whole one.
    handle.close()


@pytest.fixture
def ready():
    """The template of this process, ready; afterwards it is no more, however it was left."""
    source = template()
    source.wait_until_ready()
    yield source
    eventually(lambda: gone([source.pid]), what="the old template is gone")


def a_launch():
    return on_cpu(lambda: 1).results


@pytest.mark.parametrize(
    "answer",
    # As if half a frame had been lost, and a length that more bytes are waited for than ever come.
    [b"garbage that is no frame", b"\x00\x10\x00\x00\x00"],
)
def test_a_template_whose_answers_are_not_understood_is_replaced(answer, ready, monkeypatch):
    receive = ready._receive  # of this one alone: the new one may take longer
    monkeypatch.setattr(ready, "_receive", lambda kind, run, _: receive(kind, run, 0.5))
    ready._channel._incoming += answer
    began = time.monotonic()
    assert a_launch() == [1, 1]
    assert time.monotonic() - began < SOON
    assert template().pid != ready.pid


@pytest.mark.long
@pytest.mark.timeout(4 * SOON)
def test_launches_of_two_threads_with_other_variables(monkeypatch):
    """Each needs a template of its own: neither closes the one that the other waits for."""

    def launch_one(number):
        environment = {"OMP_OF_A_TEST": f"test-{number}"}
        return on_cpu(lambda: os.environ["OMP_OF_A_TEST"], n=1, env=environment).results

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(launch_one, 0)
        time.sleep(0.3)  # the second comes while the first waits for the imports
        second = pool.submit(launch_one, 1)
        assert first.result(3 * SOON) + second.result(3 * SOON) == ["test-0", "test-1"]
    assert a_launch() == [1, 1]


def test_a_template_of_a_package_that_was_updated_meanwhile_is_named(monkeypatch):
    monkeypatch.setattr(wire, "VERSION", wire.VERSION + 1)
    source = Template(os.environ)
    with pytest.raises(LaunchError, match="another version of notebook_accel"):
        source.wait_until_ready()
    assert gone([source.pid])
