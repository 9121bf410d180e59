"""The settle window of a rank: its own time, on a real process that others keep from running."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import time
from typing import TYPE_CHECKING

import pytest

from notebook_accel.launch import wire
from notebook_accel.launch.agent.ending import SETTLE_SECONDS
from notebook_accel.launch.agent.file_tail import FileTail
from notebook_accel.launch.agent.gauges import Gauges
from notebook_accel.launch.agent.rank_process import RankProcess
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.transport.scoreboard import Scoreboard
from tests.engines.processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess
    from pathlib import Path

_fork = multiprocessing.get_context("fork")
CALL = wire.Call(call=1, payload=wire.Packet(header=b""), grace=10)


def spin(processor: int, policy: int) -> None:
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, policy, os.sched_param(0))
    while True:
        pass


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


def test_the_window_stands_still_while_others_have_the_processor(
    begin: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    processor = min(os.sched_getaffinity(0))
    other = begin(spin, processor, os.SCHED_OTHER)
    rank = watched(begin(spin, processor, os.SCHED_IDLE), tmp_path)
    eventually(lambda: os.sched_getscheduler(rank.pid) == os.SCHED_IDLE, within=30, what="it spins")
    rank.note_started()
    rank.begin_settling()
    began = time.monotonic()
    while time.monotonic() < began + 2 * SETTLE_SECONDS:
        assert not rank.has_settled()
    other.kill()
    # On a busy machine it would starve on.
    os.sched_setscheduler(rank.pid, os.SCHED_OTHER, os.sched_param(0))
    eventually(rank.has_settled, within=60, what="it had its time")


def test_the_window_of_a_rank_that_waits_runs(
    begin: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    rank = watched(begin(time.sleep, 600), tmp_path)
    rank.note_started()
    rank.begin_settling()
    assert not rank.has_settled()
    eventually(rank.has_settled, within=30, what="it had its time")


def test_the_window_begins_with_the_function(
    begin: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    rank = watched(begin(time.sleep, 600), tmp_path)
    rank.begin_settling()
    began = time.monotonic()
    eventually(lambda: time.monotonic() > began + SETTLE_SECONDS, within=30, what="time passed")
    assert not rank.has_settled()
    rank.note_started()
    assert not rank.has_settled()
    eventually(rank.has_settled, within=30, what="it had its time")


def test_a_rank_whose_log_and_figures_cannot_be_read_is_watched_on(
    begin: Callable[..., BaseProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    rank = watched(begin(time.sleep, 600), tmp_path)
    monkeypatch.setattr(rank._tail, "read", fail)
    monkeypatch.setattr(rank._gauges, "_read_process", fail)
    assert [type(message) for message in rank.observe(time.monotonic())] == [wire.Sample]
