"""The kernel's handle of a template: what it is asked, and what it answers."""

import errno
import os
import resource
import socket
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from notebook_accel import wire
from notebook_accel.errors import LaunchError
from notebook_accel.launch.preflight import look_at_machine
from notebook_accel.launch.template import handle
from notebook_accel.launch.template.handle import _key, ask_template, template, warm


@pytest.fixture
def source():
    """The template of this process, ready."""
    source = template()
    source.wait_until_ready()
    return source


def test_devices_that_cannot_be_counted_are_not_taken_for_none():
    source = template()
    # No process can have a variable with this name, so the child that counts fails. "VISIBLE" in
    # it makes it a question of its own: answers are kept by the variables that choose devices.
    with pytest.raises(LaunchError, match=r"(?s)could not be counted.*devices='cpu'.*ValueError"):
        source.count_devices({**os.environ, "VISIBLE=": "1"})
    assert source.count_devices(dict(os.environ)).kind


def test_what_the_system_refuses_the_process_is_named(monkeypatch):
    refused = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=refused))
    # A variable that is read at import makes it a question for a new process.
    monkeypatch.setenv("OMP_REFUSED", "1")
    with pytest.raises(LaunchError, match=r"temporarily unavailable.*ulimit -u"):
        ask_template(os.environ, lambda source: source.wait_until_ready())
    assert "ulimit -u" in look_at_machine().found.error
    monkeypatch.setattr(handle, "_is_warm", False)
    warm()


@pytest.mark.parametrize(
    ("name", "needs_another"),
    [
        ("TORCH_COMPILE_DISABLE", True),
        ("TORCH_TRACE", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", True),
        ("PYTORCH_ALLOC_CONF", True),
        ("TRITON_INTERPRET", True),
        ("TQDM_DISABLE", True),
        ("MALLOC_ARENA_MAX", True),
        # Set by imports and calls of torch._inductor and scikit-learn.
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("TRITON_CACHE_DIR", False),
        ("KMP_INIT_AT_FORK", False),
        # Read later, or by what the template does not import.
        ("TORCH_HOME", False),
        ("TMPDIR", False),
    ],
)
def test_which_variables_need_another_template(name, needs_another):
    assert (_key({name: "1"}) != _key({})) is needs_another


def test_a_kernel_without_room_for_a_descriptor_ends_no_template(source):
    closed = socket.socket()
    closed.close()
    # Its number, -1, cannot be duplicated, as none can where too many files are open.
    with pytest.raises(OSError, match="Bad file descriptor"):
        source.fork_agent(closed, run="r")
    assert source.alive


def test_an_exit_that_was_not_read_yet_is_known_without_waiting(source, monkeypatch):
    exited = wire.AgentExited(pid=-8, exitcode=9)
    monkeypatch.setattr(source, "_channel", SimpleNamespace(drain=lambda: [(exited, [])]))
    assert source.exit_of(-8, timeout=0.0) is exited


def test_a_kernel_that_can_open_no_file_still_hears_its_template(source):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Descriptors 0 to 2 are taken, so that there is none for anything new.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        found = source.count_devices({**os.environ, "VISIBLE_TO_NOBODY": "1"})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.kind
    assert source.alive
