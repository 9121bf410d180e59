"""For the tests of what crosses between a notebook and its ranks."""

import signal

import pytest

from notebook_accel.launch.worker.interrupts import WAKE_SIGNAL
from tests.descriptors import open_descriptors
from tests.launch.payload.notebooks import Notebook


@pytest.fixture
def notebook(monkeypatch):
    return Notebook(monkeypatch)


@pytest.fixture
def leaves_no_descriptor():
    before = open_descriptors()
    yield
    assert not open_descriptors() - before


@pytest.fixture
def signals_come_back():
    """Leave the handlers of the signals that a rank handles as they were."""
    before = [(one, signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGALRM, WAKE_SIGNAL)]
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for one, handler in before:
        signal.signal(one, handler)
