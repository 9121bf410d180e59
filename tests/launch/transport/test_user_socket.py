"""The socket of a run: reached by its name, and by one user alone."""

from __future__ import annotations

import os
import socket
from uuid import uuid4

import pytest

from notebook_accel import wire
from notebook_accel.launch.transport import user_socket


def test_a_message_goes_through_the_socket_of_a_run() -> None:
    run = uuid4().hex
    with user_socket.listen(run) as listener:
        with pytest.raises(OSError, match="in use"):
            user_socket.listen(run)
        kernel = user_socket.connect(run)
        keeper = user_socket.accept(listener)
        assert kernel is not None
        assert keeper is not None
        kernel.send(wire.Stop(grace=3.0))
        message, _ = keeper.receive()
        assert isinstance(message, wire.Stop)
        assert message.grace == 3.0
        kernel.close()
        keeper.close()
    with pytest.raises(ConnectionRefusedError):
        user_socket.connect(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for once")
def test_another_user_is_refused() -> None:
    run = uuid4().hex
    with user_socket.listen(run) as listener, socket.socket(socket.AF_UNIX) as stranger:
        os.seteuid(65534)
        try:
            stranger.connect(f"\0notebook-accel/{run}")
            assert user_socket.connect(run) is None
        finally:
            os.seteuid(0)
        assert user_socket.accept(listener) is None
        assert stranger.recv(1) == b""
