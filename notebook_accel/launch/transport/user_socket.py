"""A unix socket with the name of a run, by which processes of the same user can connect.

    keeper of a detached run: listen(run) -> accept -> Channel
    a later kernel:           connect(run) -> Channel

A detached run goes on after its notebook's kernel has ended; a process of its own, the keeper,
supervises it, and a later kernel can connect to the keeper. The socket has an abstract name, which
is in no folder and ends with the keeper; processes of any user can connect to it. So either end
asks the system for the user of the other process (SO_PEERCRED) before it reads a byte.
"""

from __future__ import annotations

import os
import socket
import struct

from notebook_accel.launch.transport.channel import Channel

# pid, uid and gid, as the system gives them.
_CREDENTIALS = struct.Struct("3i")


def _address(run: str) -> str:
    return f"\0notebook-accel/{run}"


def listen(run: str) -> socket.socket:
    """Return a listening, non-blocking unix socket with the name of a run.

    Raises:
        OSError: there is such a socket already.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_address(run))
        listener.listen()
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def accept(listener: socket.socket) -> Channel | None:
    """Return a channel over the next waiting connection.

    None if no connection waits, or if a process of another user made the connection, which is then
    closed. Called when ``listener`` is readable.
    """
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    return _checked(sock)


def connect(run: str) -> Channel | None:
    """Return a channel to the process that listens for a run.

    None if that process belongs to another user.

    Raises:
        OSError: no process of this machine (or container) listens.
    """
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)  # where many wait to be accepted, another would wait for ever
    try:
        sock.connect(_address(run))
    except OSError:
        sock.close()
        raise
    return _checked(sock)


def _checked(sock: socket.socket) -> Channel | None:
    sock.setblocking(True)
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    if uid != os.geteuid():
        sock.close()
        return None
    return Channel(sock)
