"""The socket of a run's folder: reached however long its path is, and by one user alone."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from notebook_accel import wire
from notebook_accel.launch.transport import user_socket


def test_a_message_goes_through_a_socket_of_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    with user_socket.listen(folder) as listener:
        kernel = user_socket.connect(folder)
        keeper = user_socket.accept(listener)
        assert kernel is not None
        assert keeper is not None
        kernel.send(wire.Stop(grace=3.0))
        message, _ = keeper.receive()
        assert isinstance(message, wire.Stop)
        assert message.grace == 3.0
        kernel.close()
        keeper.close()
    user_socket.remove(folder)
    with pytest.raises(FileNotFoundError):
        user_socket.connect(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for once")
def test_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as stranger:
        folder = Path(name)
        with user_socket.listen(folder) as listener:
            folder.chmod(0o755)  # as no run's folder is
            (folder / ".attach").chmod(0o777)
            os.seteuid(65534)
            try:
                stranger.connect(str(folder / ".attach"))
                assert user_socket.connect(folder) is None
            finally:
                os.seteuid(0)
            assert user_socket.accept(listener) is None
            assert stranger.recv(1) == b""
