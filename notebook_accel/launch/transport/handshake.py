"""How a connection between two processes of a run begins: both prove that they know its secret.

    accept                              connect
    version, nonce A          --->      is the version ours?
    does the proof fit?       <---      nonce B, HMAC(secret, "connect" A B)
    HMAC(secret, "accept" A B) --->     does the proof fit?

A and B are fresh random nonces, so an old proof cannot be replayed. The two ends sign different
words ("connect", "accept"), so an end's own proof cannot be sent back to it. Nothing that follows
the peer's proof is read before that proof has been checked. Nothing is encrypted: the sockets are
unix sockets, or connect to the loopback interface.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterator

from notebook_accel import wire
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.transport.frames import FramedChannel

# Bytes, as many as SHA-256 gives.
_NONCE = 32
_PROOF = 32
_MAGIC = b"notebook-accel %03d" % wire.VERSION
# Three short messages; a machine that swaps takes a second for them.
_HANDSHAKE_SECONDS = 10.0

# What a socket can do decides how large values travel: only a unix socket carries descriptors.
_CHANNELS: dict[int, type[Channel]] = {
    socket.AF_UNIX: Channel,
    socket.AF_INET: FramedChannel,
    socket.AF_INET6: FramedChannel,
}


class AuthenticationError(NotebookAccelError):
    """Raised if the handshake with the peer fails.

    The peer did not prove in time that it knows the run's secret, or the two processes use
    different versions of the message protocol.
    """


def new_secret() -> bytes:
    """Return a new random secret for one run."""
    return secrets.token_bytes(32)


def accept(sock: socket.socket, secret: bytes) -> Channel:
    """Return a channel over ``sock`` once the peer, which calls :func:`connect`, is authenticated.

    Args:
        sock: connected socket; the channel owns it from now on.

    Raises:
        AuthenticationError: the peer did not prove in time that it knows the secret. ``sock`` is
            closed.
    """
    with _handshake(sock) as read:
        mine = secrets.token_bytes(_NONCE)
        sock.sendall(_MAGIC + mine)
        theirs = read(_NONCE)
        _check(read(_PROOF), _proof(secret, b"connect", mine, theirs))
        sock.sendall(_proof(secret, b"accept", mine, theirs))
    return _CHANNELS[sock.family](sock)


def connect(sock: socket.socket, secret: bytes) -> Channel:
    """Return a channel over ``sock`` once the peer, which calls :func:`accept`, is authenticated.

    Args:
        sock: connected socket; the channel owns it from now on.

    Raises:
        AuthenticationError: the peer did not prove in time that it knows the secret, or has another
            version of the protocol. ``sock`` is closed.
    """
    with _handshake(sock) as read:
        _check_version(read(len(_MAGIC)))
        theirs = read(_NONCE)
        mine = secrets.token_bytes(_NONCE)
        sock.sendall(mine + _proof(secret, b"connect", theirs, mine))
        _check(read(_PROOF), _proof(secret, b"accept", theirs, mine))
    return _CHANNELS[sock.family](sock)


@contextlib.contextmanager
def _handshake(sock: socket.socket) -> Iterator[Callable[[int], bytes]]:
    """Limit the time that the handshake in the block takes in all."""
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    try:
        yield lambda size: _read_exactly(sock, size, deadline)
    except (OSError, EOFError) as error:
        sock.close()
        raise AuthenticationError(f"the peer did not prove the run's secret: {error}") from None
    except AuthenticationError:
        sock.close()
        raise
    sock.settimeout(None)


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


def _check(given: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(given, expected):
        raise AuthenticationError("the peer did not prove the run's secret")


def _check_version(given: bytes) -> None:
    if given != _MAGIC:
        raise AuthenticationError(
            f"the peer speaks another version ({given!r}; this is {_MAGIC!r}): was the package "
            "updated meanwhile? Restart the kernel"
        )


def _read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        # Never 0, which would mean not to wait at all.
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("it closed the connection")
        data += part
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return data
