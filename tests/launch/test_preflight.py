"""A launch that cannot go well ends before it begins, and says what to do."""

import os
import resource
import socket
import tempfile
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from notebook_accel import ConfigError, LaunchError, wire
from notebook_accel.config import LaunchConfig
from notebook_accel.launch.preflight import (
    Machine,
    check_call,
    check_files_of_ranks,
    check_port,
    crowding,
)
from notebook_accel.system import processes
from tests.interpreters import run_script
from tests.launches import launch
from tests.ports import free_port


def train(lr, *, steps=1): ...


class Trainer:
    def __call__(self, lr): ...

    def fit(self, lr): ...


def steps(lr):
    yield lr


async def train_later(): ...


async def steps_later():
    yield 1


def take_all(*_, **__): ...


# ---- the call ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (train, (0.1,), None),
        (train, [0.1], {"steps": 3}),
        (train, (), {"lr": 0.1}),
        (partial(train, 0.1), (), {}),
        (lambda *args, **kwargs: None, (1, 2), {"a": 1}),
        (Trainer(), (0.1,), None),
        (Trainer().fit, (0.1,), None),
        (print, ("anything",), {"end": ""}),
        (dict, (), {"a": 1}),
        (train, (0.1,), OrderedDict(steps=2)),
    ],
)
def test_calls_that_can_be_made(function, args, kwargs):
    check_call(function, args, kwargs)


RETURNED = (None, 0.93, [1], "train", torch.nn.Linear(2, 1))
RUNS_NOTHING = (steps, train_later, partial(train_later), steps_later)
NO_ARGS = ("text", b"bytes", 3, 0.1, None, {0.1}, iter((1,)), torch.ones(2))


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "said"),
    [
        *((value, (), None, ("without calling", repr(value))) for value in RETURNED),
        *((one, (1,), None, ("runs nothing by itself", "asyncio.run")) for one in RUNS_NOTHING),
        (train, (), None, ("missing a required argument: 'lr'", "train(lr")),
        (train, (1, 2), None, ("too many positional arguments", "train(lr")),
        (train, (1,), {"step": 2}, ("unexpected keyword argument 'step'", "train(lr")),
        (train, (1,), {"lr": 2}, ("multiple values for argument 'lr'", "train(lr")),
        (train, {"lr": 0.1}, None, ("kwargs=",)),
        *((take_all, args, None, ("tuple", f"args={args!r}")) for args in NO_ARGS),
        *((take_all, (), kwargs, ("kwargs", repr(kwargs))) for kwargs in ([1], "lr", {1: 2}, 7)),
    ],
)
def test_a_call_that_cannot_be_made_says_what_was_given_and_expected(function, args, kwargs, said):
    with pytest.raises(ConfigError) as caught:
        check_call(function, args, kwargs)
    assert all(part in str(caught.value) for part in said), caught.value


# ---- the machine ---------------------------------------------------------------------------


def test_more_ranks_than_open_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    check_files_of_ranks(128)
    with pytest.raises(LaunchError, match="1024") as caught:
        check_files_of_ranks(500)
    assert "500 ranks" in str(caught.value)
    assert "ulimit" in str(caught.value)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    check_files_of_ranks(500)


def test_ranks_that_share_too_little_are_told_of():
    host = {"num_cores": 2, "memory": 2**34, "free_memory": 2**31}
    machine = Machine(found=wire.Devices(kind="cpu"), **host)
    for ranks in (None, 1, 8):
        assert crowding(LaunchConfig(num_processes=ranks), machine) == ""
    for ranks, free in ((9, 2**34), (8, 2**30)):
        text = crowding(LaunchConfig(num_processes=ranks), replace(machine, free_memory=free))
        assert f"{ranks} ranks share 2 CPU cores" in text


def test_a_port_that_is_taken():
    port = free_port()
    refused = pytest.raises(LaunchError, match=f"use_port={port}")
    with socket.create_server(("127.0.0.1", port)), refused:
        check_port(LaunchConfig(use_port=port))
    check_port(LaunchConfig(use_port=port))


def test_a_port_that_others_listen_on_everywhere():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match="choose another"):
            check_port(LaunchConfig(use_port=port))


# ---- the place -----------------------------------------------------------------------------


def launched():
    launch(lambda: 1, config=LaunchConfig(devices="cpu", num_processes=1))


def test_a_platform_that_cannot_end_ranks(monkeypatch):
    monkeypatch.setattr(processes, "supported", lambda: False)
    with pytest.raises(LaunchError, match="inline"):
        launched()
    assert launch(lambda: 1, config=LaunchConfig(engine="inline")).results == [1]


def test_a_current_folder_that_was_deleted(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(LaunchError, match=r"os\.chdir"):
        launched()


def test_no_folder_for_temporary_files(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(LaunchError, match="TMPDIR"):
        launched()
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(LaunchError, match="TMPDIR"):
        launched()


def test_a_call_that_a_container_refuses(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=PermissionError))
    with pytest.raises(LaunchError, match="a profile that allows pidfd_open"):
        launched()


# ---- how long to wait ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "timeout", ["3", 0, -1, 0.0, float("nan"), True, [3], float("-inf"), 1j, "x" * 10_000_000]
)
def test_a_timeout_that_is_none(timeout):
    with pytest.raises(ConfigError, match=r"timeout=.*seconds above 0") as caught:
        launch(lambda: 1, config=LaunchConfig(engine="inline"), timeout=timeout)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("block", ["no", 0, 1, None, "yes"])
def test_a_block_that_is_no_flag(block):
    with pytest.raises(ConfigError, match=r"block=.*True or False"):
        launch(lambda: 1, config=LaunchConfig(engine="inline"), block=block)


@pytest.mark.parametrize("timeout", [None, 30, 0.5, float("inf"), np.float32(30), np.int64(30)])
def test_timeouts_that_are_fine(timeout):
    config = LaunchConfig(engine="inline")
    assert launch(lambda: 1, config=config, timeout=timeout).results == [1]


_WITH_OLD_TORCH = """
import notebook_accel
try:
    notebook_accel.notebook_launcher(print, num_processes=1)
except notebook_accel.LaunchError as error:
    print(error)
try:
    from notebook_accel import Accelerator
except ImportError as error:
    print(error)
"""


def test_an_old_torch_is_named_by_a_launch_and_an_import(tmp_path):
    metadata = tmp_path / "torch-2.6.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0+cu124\n")
    told = run_script(_WITH_OLD_TORCH, PYTHONPATH=str(tmp_path))
    said = "torch 2.6.0+cu124 is installed, and torch 2.9 or newer is needed: pip install 'torch"
    assert [line.startswith(said) for line in told.splitlines()] == [True, True]
