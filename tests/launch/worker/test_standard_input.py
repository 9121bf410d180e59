"""What code that asks a person finds in a rank."""

import pdb
import sys

import pytest

from notebook_accel import WorkerError, notebook_launcher


def asks():
    input("name? ")


def breaks():
    breakpoint()


def debugs():
    pdb.set_trace()
    print("beyond")


def reads():
    sys.stdin.read()


@pytest.mark.parametrize("function", [asks, breaks, debugs, reads])
def test_the_error_names_the_way_out(function):
    with pytest.raises(WorkerError, match='engine="inline"'):
        notebook_launcher(function, num_processes=1, view="none")


@pytest.mark.long
def test_a_breakpoint_that_is_switched_off_stays_off(monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    notebook_launcher(breaks, num_processes=1, view="none")
