"""A template that does not answer: a launch gets a new one, within a bounded time."""

import os
import threading
import time

import pytest

from notebook_accel import wire
from notebook_accel.errors import LaunchError
from notebook_accel.launch.template import handle
from notebook_accel.launch.template.handle import Template, template
from tests.engines.processes import gone
from tests.launches import on_cpu
from tests.templates import import_little
from tests.waiting import eventually

# A new template imports torch, on a busy machine.
SOON = 40.0


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


def test_a_template_that_answers_garbage_is_replaced(ready):
    # As if half a frame had been lost: what follows is read as another length.
    ready._channel._incoming += b"garbage that is no frame"
    assert a_launch() == [1, 1]
    assert template().pid != ready.pid


def test_a_template_whose_answer_is_lost_is_replaced(ready, monkeypatch):
    monkeypatch.setattr(handle, "_FORK_SECONDS", 0.5)
    # A length that more bytes are waited for than will ever come.
    ready._channel._incoming += b"\x00\x10\x00\x00\x00"
    began = time.monotonic()
    assert a_launch() == [1, 1]
    assert time.monotonic() - began < SOON


@pytest.mark.long
@pytest.mark.timeout(4 * SOON)
def test_launches_of_two_threads_with_other_variables(monkeypatch):
    """Each needs a template of its own: neither closes the one that the other waits for."""
    results = {}

    def launch_one(number):
        try:
            environment = {"OMP_OF_A_TEST": f"test-{number}"}
            run = on_cpu(lambda: os.environ["OMP_OF_A_TEST"], n=1, env=environment)
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


def test_a_template_of_a_package_that_was_updated_meanwhile_is_named(monkeypatch):
    monkeypatch.setattr(wire, "VERSION", wire.VERSION + 1)
    source = Template(os.environ)
    with pytest.raises(LaunchError, match="another version of notebook_accel"):
        source.wait_until_ready()
    assert gone([source.pid])
