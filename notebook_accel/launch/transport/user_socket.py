"""A unix socket in a run's folder, by which processes of the same user can connect.

    keeper of a detached run: listen(folder) -> accept -> Channel
    a later kernel:                  connect(folder) -> Channel

A detached run goes on after its notebook's kernel has ended; a process of its own, the keeper,
supervises it, and a later kernel can connect to the keeper. Either end asks the system for the user
of the other process (SO_PEERCRED) before it reads a byte.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from notebook_accel.launch.transport.channel import Channel

_NAME = ".attach"
# pid, uid and gid, as the system gives them.
_CREDENTIALS = struct.Struct("3i")


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield a short path to the folder's socket, valid within the block."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_NAME}"
    finally:
        os.close(fd)


def listen(folder: Path) -> socket.socket:
    """Return a listening, non-blocking unix socket, whose file is in ``folder``.

    Raises:
        OSError: the folder has such a socket already, cannot be written, or cannot hold sockets.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _address(folder) as address:
            listener.bind(address)
        listener.listen()
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
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


def connect(folder: Path) -> Channel | None:
    """Return a channel to the process that listens in ``folder``.

    None if that process belongs to another user.

    Raises:
        OSError: no process listens there.
    """
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)  # where many wait to be accepted, another would wait for ever
    try:
        with _address(folder) as address:
            sock.connect(address)
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


def remove(folder: Path) -> None:
    """Remove the socket file that :func:`listen` made in ``folder``, if it is there."""
    (folder / _NAME).unlink(missing_ok=True)
