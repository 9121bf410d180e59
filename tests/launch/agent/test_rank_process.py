"""What an agent sees of a rank's process."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import time
from typing import TYPE_CHECKING

import pytest

from notebook_accel.launch import wire
from notebook_accel.launch.agent.file_tail import FileTail
from notebook_accel.launch.agent.gauges import Gauges
from notebook_accel.launch.agent.rank_process import RankProcess
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.transport.scoreboard import Scoreboard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess
    from pathlib import Path

_fork = multiprocessing.get_context("fork")
CALL = wire.BeginCall(call=1, payload=wire.Packet(header=b""), grace=10)


@pytest.fixture
def begin() -> Iterator[Callable[..., BaseProcess]]:
    """Starts processes, which end with the test."""
    begun: list[BaseProcess] = []

    def start(target: Callable[..., None], *args: object) -> BaseProcess:
        process = _fork.Process(target=target, args=args)
        process.start()
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.join()


def watched(process: BaseProcess, folder: Path) -> RankProcess:
    ours, _ = socket.socketpair()
    (folder / "log").touch()
    rank = RankProcess(
        rank=0,
        process=process,
        channel=Channel(ours),
        tail=FileTail(folder / "log"),
        stacks=os.memfd_create("stacks"),
        disconnect=os.eventfd(0),
        row=Scoreboard(1, has_others=False).row(0),
        gauges=Gauges(process.pid or 0),
    )
    rank.begin_call(CALL, ())
    return rank


def test_a_rank_whose_log_and_figures_cannot_be_read_is_watched_on(
    begin: Callable[..., BaseProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    rank = watched(begin(time.sleep, 600), tmp_path)
    monkeypatch.setattr(FileTail, "read", fail)
    monkeypatch.setattr(rank._gauges, "_read_process", fail)
    assert [type(message) for message in rank.observe(time.monotonic())] == [wire.Sample]
