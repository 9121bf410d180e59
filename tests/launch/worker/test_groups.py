"""How a rank finds the connections on which other ranks may wait."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from notebook_accel.launch.worker import groups


@pytest.mark.parametrize("is_old", [False, True], ids=["psutil 6", "psutil 5.9"])
def test_connections_are_found_by_old_and_new_psutil(
    is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_old:
        monkeypatch.setattr(
            psutil.Process, "connections", psutil.Process.net_connections, raising=False
        )
        monkeypatch.delattr(psutil.Process, "net_connections")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in {address.port for address in groups._local_addresses(os.getpid())}
