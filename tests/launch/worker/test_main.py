"""What a rank's process does between calls."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from notebook_accel.launch.transport.channel import ProtocolError
from notebook_accel.launch.transport.scoreboard import RankRow
from notebook_accel.launch.worker import groups
from notebook_accel.launch.worker.interrupts import WAKE_SIGNAL, Interrupts
from notebook_accel.launch.worker.main import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, WAKE_SIGNAL)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_call_that_cannot_be_read_is_named_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    def receive() -> NoReturn:
        raise ProtocolError("too many files are open here")

    worker: Any = object.__new__(Worker)
    worker._channel = SimpleNamespace(receive=receive)
    assert worker._serve_calls() == 1, "the call before may have gone well"
    assert "cannot read its next call: too many files are open here" in capsys.readouterr().err


@pytest.mark.usefixtures("_signals")
def test_a_stuck_rank_is_disconnected_though_it_has_interrupted_itself_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = RankRow()
    interrupts = Interrupts(row)
    interrupts.begin_call(3)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # by its own code, which goes on
    disconnected: list[int] = []
    monkeypatch.setattr(groups, "disconnect", lambda: disconnected.append(row.disconnected_call))
    worker: Any = object.__new__(Worker)
    worker._row, worker._interrupts = row, interrupts
    worker.context = SimpleNamespace(call=3, lost_group=False)
    worker._end_lock = threading.Lock()
    row.interrupted_call = row.disconnected_call = 3  # by the agent, while it is in a collective
    worker._disconnect_if_stuck()
    assert (disconnected, worker.context.lost_group) == ([3], True)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # now it has seen the agent's
    worker._disconnect_if_stuck()
    assert disconnected == [3]
