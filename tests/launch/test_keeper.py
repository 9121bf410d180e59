"""What the keeper of a detached run sends to the kernels that are attached to it."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from notebook_accel.launch import keeper
from notebook_accel.launch.transport.channel import Channel


def test_a_large_last_state_is_not_cut() -> None:
    """As of ranks that display figures."""
    near, far = map(Channel, socket.socketpair())
    is_there = SimpleNamespace(path=Path("/"))
    call: Any = SimpleNamespace(ended=threading.Event(), state=bytes(60_000_000), folder=is_there)
    call.ended.set()
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor() as pool:
        serving = pool.submit(keeper._serve_kernels, call, listener, near)
        serving.add_done_callback(lambda _: near.close())
        message: Any
        message, _ = far.receive()
        assert len(message.state) >= len(call.state)
        serving.result()
    far.close()
