"""What a rank's process does between calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_accel.launch.transport.channel import ProtocolError
from notebook_accel.launch.worker.main import _Worker

if TYPE_CHECKING:
    import pytest


def test_a_call_that_cannot_be_read_is_named_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    def receive() -> NoReturn:
        raise ProtocolError("too many files are open here")

    worker: Any = object.__new__(_Worker)
    worker._channel = SimpleNamespace(receive=receive)
    assert worker._serve_calls() == 1, "the call before may have gone well"
    assert "cannot read its next call: too many files are open here" in capsys.readouterr().err
