"""What a rank's process does between calls."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING, NoReturn

import pytest

from notebook_accel.launch import wire
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.launch.transport.scoreboard import Scoreboard
from notebook_accel.launch.worker import groups
from notebook_accel.launch.worker.interrupts import WAKE_SIGNAL, Interrupts
from notebook_accel.launch.worker.main import Inherited, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, WAKE_SIGNAL)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def worker(_signals: None) -> Worker:
    """A rank of two, whose agent says nothing."""
    ranks = tuple(wire.RankSpec(rank=rank, local_rank=rank) for rank in (0, 1))
    launch = wire.Launch(
        run="r",
        world_size=2,
        ranks=ranks,
        environment={},
        directory="/",
        path=(),
        log_dir=None,
        num_threads=1,
    )
    _, theirs = socket.socketpair()
    board = Scoreboard(2)
    inherited = Inherited(
        agent_pid=os.getpid(),
        launch=launch,
        spec=ranks[0],
        master_port=0,
        store_socket=None,
        channel=Channel(theirs),
        board=board,
        log=-1,
        stacks=-1,
        disconnect=-1,
        unneeded=(),
    )
    return Worker(inherited, Interrupts(board.row(0)))


def test_a_call_that_cannot_be_read_is_named_in_the_log(
    worker: Worker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(_: Channel) -> NoReturn:
        raise ProtocolError("too many files are open here")

    monkeypatch.setattr(Channel, "receive", receive)
    assert worker.serve_calls() == 1, "the call before may have gone well"
    assert "cannot read its next call: too many files are open here" in capsys.readouterr().err


def test_a_stuck_rank_is_disconnected_though_it_has_interrupted_itself_before(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, context = worker.row, worker.context
    worker.interrupts.begin_call(3)
    context.begin_call(3, has_group=True)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # by its own code, which goes on
    disconnected: list[int] = []
    monkeypatch.setattr(groups, "disconnect", lambda: disconnected.append(row.disconnected_call))
    row.call_over = 0
    row.interrupted_call = row.disconnected_call = 3  # by the agent, while it is in a collective
    worker.disconnect_if_stuck()
    assert (disconnected, context.lost_group) == ([3], True)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # now it has seen the agent's
    worker.disconnect_if_stuck()
    assert disconnected == [3]
