"""The output of ranks lies in the run's folder, wherever their agent is."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from typing import TYPE_CHECKING

import pytest

from notebook_accel.launch import wire
from notebook_accel.launch.agent.logs import rank_logs
from notebook_accel.launch.system import scratch
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.launch.transport.frames import FramedChannel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOON = 10.0


def launch(log_dir: Path | None) -> wire.Launch:
    return wire.Launch(
        run="r",
        world_size=1,
        ranks=(wire.RankSpec(rank=0, local_rank=0),),
        environment={},
        directory="/",
        path=(),
        log_dir=None if log_dir is None else str(log_dir),
        num_threads=1,
    )


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def test_an_agent_that_sees_the_runs_folder_writes_there(
    tmp_path: Path, sockets: tuple[socket.socket, socket.socket]
) -> None:
    logs = rank_logs(launch(tmp_path), Channel(sockets[0]))
    fd = logs.open(0)
    os.write(fd, b"printed\n")
    os.close(fd)
    logs.end(0)
    assert (tmp_path / "rank-0.log").read_bytes() == b"printed\n"
    assert logs.path(0) == tmp_path / "rank-0.log"


def test_an_agent_that_does_not_sends_what_is_printed(
    tmp_path: Path,
    sockets: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agent, kernel = map(FramedChannel, sockets)
    logs = rank_logs(launch(None), agent)
    fd = logs.open(0)
    agent.flush()
    ((opened, _),) = kernel.drain()
    assert isinstance(opened, wire.LogOpened)
    assert opened.rank == 0
    copy = tmp_path / "rank-0.log"
    kernel.save(opened.stream, os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    os.write(fd, b"printed\n")
    os.close(fd)
    logs.end(0)
    deadline = time.monotonic() + SOON
    while not (agent.is_idle and kernel.is_idle):
        assert time.monotonic() < deadline
        agent.drain()
        kernel.drain()
    assert copy.read_bytes() == b"printed\n"
    assert logs.path(0).is_relative_to(scratch.folder("r", os.getpid()))
    agent.close()
    kernel.close()


def test_an_agent_on_the_kernels_machine_must_be_told_the_folder(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(ProtocolError, match="no folder"):
        rank_logs(launch(None), Channel(sockets[0]))
