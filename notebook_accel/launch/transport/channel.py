"""One end of a connection between two processes of a run.

A frame is a length, a number of file descriptors, and one message of ``wire.py``. A
:class:`Channel` exists only over a private socket pair, or after both ends proved with an HMAC
over fresh nonces that they know the run's secret (:func:`accept`, :func:`connect`); before that
not a byte beyond the proof itself is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["AuthenticationError", "Channel", "ProtocolError", "accept", "connect", "new_secret"]

_HEADER = struct.Struct("!IB")
_FD = struct.Struct("i")
_MAX_FRAME = 1 << 30
_MAX_FDS = 8
_CHUNK = 1 << 18
_NONCE = 32
_PROOF = 32
_MAGIC = b"notebook-accel %03d" % wire.VERSION
_HANDSHAKE_SECONDS = 10.0


class AuthenticationError(NotebookAccelError):
    """The peer does not know the run's secret, or speaks another version."""


class ProtocolError(NotebookAccelError):
    """The peer sent what is no message."""


def new_secret() -> bytes:
    """A secret for one run."""
    return secrets.token_bytes(32)


class Channel:
    """Messages, and file descriptors beside them, over a connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._incoming = bytearray()
        self._incoming_fds: deque[int] = deque()
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._end: EOFError | ProtocolError | None = None
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    # ---- out -------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Frames that wait to be written."""
        return len(self._outgoing)

    def post(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Queue a message. Descriptors are duplicated: the caller's stay the caller's.

        Raises:
            ProtocolError: it is larger than any message may be.
        """
        data = wire.encode(message)
        if len(data) > _MAX_FRAME:
            raise ProtocolError(
                f"a {type(message).__name__} of {len(data):,} bytes was to be sent; "
                f"a message has at most {_MAX_FRAME:,} bytes"
            )
        frame = memoryview(_HEADER.pack(len(data), len(fds)) + data)
        self._outgoing.append((frame, tuple(os.dup(fd) for fd in fds)))

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Write a message, and all that was queued before it; blocks.

        Raises:
            OSError: the peer is gone.
        """
        self.post(message, fds)
        self.flush()

    def flush(self, *, block: bool = True) -> None:
        """Write what is queued; without ``block`` only what the socket takes now."""
        flags = 0 if block else socket.MSG_DONTWAIT
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                self._write_some(flags)

    def _write_some(self, flags: int) -> None:
        frame, fds = self._outgoing[0]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
        written = self._socket.sendmsg([frame], rights if fds else [], flags)
        for fd in fds:
            os.close(fd)
        if written == len(frame):
            self._outgoing.popleft()
        else:
            self._outgoing[0] = (frame[written:], ())

    # ---- in --------------------------------------------------------------------------------

    def receive(self) -> tuple[wire.Message, list[int]]:
        """The next message and its descriptors, which are the caller's; blocks.

        Raises:
            EOFError: the peer is gone.
            ProtocolError: what came is no message.
        """
        while True:
            for message in self._parse():
                return message
            if self._end is not None:
                raise self._end
            self._read(0)

    def drain(self, *, limit: int | None = None) -> list[tuple[wire.Message, list[int]]]:
        """The messages that are there now; does not block.

        Args:
            limit: stop reading once there are that many, though the peer may have sent more.

        Raises:
            EOFError: the peer is gone and everything before was given out.
            ProtocolError: what came is no message, and everything before was given out.
        """
        messages = list(self._parse())
        with contextlib.suppress(BlockingIOError):
            while self._end is None and (limit is None or len(messages) < limit):
                self._read(socket.MSG_DONTWAIT)
                messages.extend(self._parse())
        if self._end is not None and not messages:
            raise self._end
        return messages

    def _read(self, flags: int) -> None:
        flags |= getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            data, rights, _, _ = self._socket.recvmsg(
                _CHUNK, socket.CMSG_SPACE(_MAX_FDS * _FD.size), flags
            )
        except ConnectionResetError:
            data, rights = b"", []
        for _, kind, packed in rights:
            if kind == socket.SCM_RIGHTS:
                whole = packed[: len(packed) // _FD.size * _FD.size]
                self._incoming_fds.extend(fd for (fd,) in _FD.iter_unpack(whole))
        if not data:
            self._end = EOFError("the other end of the channel is gone")
        self._incoming += data

    def _parse(self) -> Iterator[tuple[wire.Message, list[int]]]:
        """The whole messages that were read; what is no message ends the channel."""
        try:
            while not isinstance(self._end, ProtocolError):
                body, num_fds = self._next_frame()
                if body is None:
                    return
                message = wire.decode(body)
                yield message, [self._incoming_fds.popleft() for _ in range(num_fds)]
        except msgspec.MsgspecError as error:
            self._end = ProtocolError(f"what came is no message: {error}")
        except ProtocolError as error:
            self._end = error

    def _next_frame(self) -> tuple[bytes | None, int]:
        """The next frame, where it is whole, and how many descriptors belong to it."""
        if len(self._incoming) < _HEADER.size:
            return None, 0
        length, num_fds = _HEADER.unpack_from(self._incoming)
        if length > _MAX_FRAME or num_fds > _MAX_FDS:
            raise ProtocolError(f"a frame of {length} bytes and {num_fds} descriptors came")
        end = _HEADER.size + length
        if len(self._incoming) < end:
            return None, 0
        if num_fds > len(self._incoming_fds):
            raise ProtocolError(
                f"a frame of {num_fds} descriptors came with {len(self._incoming_fds)}"
            )
        body = bytes(memoryview(self._incoming)[_HEADER.size : end])
        del self._incoming[:end]
        return body, num_fds

    # ---- end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket and every descriptor that was not taken or sent."""
        if self.closed:
            return
        self.closed = True
        for fd in (*self._incoming_fds, *(fd for _, fds in self._outgoing for fd in fds)):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._incoming_fds.clear()
        self._outgoing.clear()
        self._socket.close()

    def detach(self) -> int:
        """The socket's descriptor, now the caller's."""
        return self._socket.detach()


def accept(sock: socket.socket, secret: bytes, *, timeout: float = _HANDSHAKE_SECONDS) -> Channel:
    """The channel over ``sock``, once the peer that calls :func:`connect` proved the secret.

    Raises:
        AuthenticationError: it did not within ``timeout`` seconds; ``sock`` is closed.
    """
    with _handshake(sock, timeout) as read:
        mine = secrets.token_bytes(_NONCE)
        sock.sendall(_MAGIC + mine)
        theirs = read(_NONCE)
        _check(read(_PROOF), _proof(secret, b"connect", mine, theirs))
        sock.sendall(_proof(secret, b"accept", mine, theirs))
    return Channel(sock)


def connect(sock: socket.socket, secret: bytes, *, timeout: float = _HANDSHAKE_SECONDS) -> Channel:
    """The channel over ``sock``, once the peer that calls :func:`accept` proved the secret.

    Raises:
        AuthenticationError: it did not within ``timeout`` seconds; ``sock`` is closed.
    """
    with _handshake(sock, timeout) as read:
        _check_version(read(len(_MAGIC)))
        theirs = read(_NONCE)
        mine = secrets.token_bytes(_NONCE)
        sock.sendall(mine + _proof(secret, b"connect", theirs, mine))
        _check(read(_PROOF), _proof(secret, b"accept", theirs, mine))
    return Channel(sock)


@contextlib.contextmanager
def _handshake(sock: socket.socket, timeout: float) -> Iterator[Callable[[int], bytes]]:
    """Gives what reads from the peer; all of the handshake takes ``timeout`` seconds at most."""
    sock.settimeout(timeout)
    deadline = time.monotonic() + timeout
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
