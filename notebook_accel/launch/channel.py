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
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch import wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["AuthenticationError", "Channel", "ProtocolError", "accept", "connect", "new_secret"]

_HEADER = struct.Struct("!IB")
_MAX_FRAME = 1 << 30
_MAX_FDS = 8
_CHUNK = 1 << 18
_NONCE = 32
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
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    # ---- out -------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Frames that wait to be written."""
        return len(self._outgoing)

    def post(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Queue a message. Descriptors are duplicated: the caller's stay the caller's."""
        data = wire.encode(message)
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
            self._read(0)

    def drain(self) -> list[tuple[wire.Message, list[int]]]:
        """All messages that are there now; does not block.

        Raises:
            EOFError: the peer is gone and everything before was given out.
            ProtocolError: what came is no message.
        """
        messages = list(self._parse())
        try:
            while True:
                self._read(socket.MSG_DONTWAIT)
                messages.extend(self._parse())
        except BlockingIOError:
            return messages
        except EOFError:
            if not messages:
                raise
            return messages

    def _read(self, flags: int) -> None:
        flags |= getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            data, rights, _, _ = self._socket.recvmsg(
                _CHUNK, socket.CMSG_SPACE(_MAX_FDS * 4), flags
            )
        except ConnectionResetError:
            data, rights = b"", []
        for _, kind, packed in rights:
            if kind == socket.SCM_RIGHTS:
                count = len(packed) // 4
                self._incoming_fds.extend(struct.unpack(f"{count}i", packed[: count * 4]))
        if not data:
            raise EOFError("the other end of the channel is gone")
        self._incoming += data

    def _parse(self) -> Iterator[tuple[wire.Message, list[int]]]:
        while len(self._incoming) >= _HEADER.size:
            length, num_fds = _HEADER.unpack_from(self._incoming)
            if length > _MAX_FRAME or num_fds > _MAX_FDS:
                raise ProtocolError(f"a frame of {length} bytes and {num_fds} descriptors came")
            end = _HEADER.size + length
            if len(self._incoming) < end:
                return
            body = bytes(memoryview(self._incoming)[_HEADER.size : end])
            del self._incoming[:end]
            fds = [self._incoming_fds.popleft() for _ in range(num_fds) if self._incoming_fds]
            yield self._decode(body), fds

    @staticmethod
    def _decode(body: bytes) -> wire.Message:
        try:
            return wire.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"what came is no message: {error}") from None

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
    with _handshake(sock, timeout):
        mine = secrets.token_bytes(_NONCE)
        sock.sendall(_MAGIC + mine)
        theirs = _read_exactly(sock, _NONCE)
        _check(_read_exactly(sock, 32), _proof(secret, b"connect", mine, theirs))
        sock.sendall(_proof(secret, b"accept", mine, theirs))
    return Channel(sock)


def connect(sock: socket.socket, secret: bytes, *, timeout: float = _HANDSHAKE_SECONDS) -> Channel:
    """The channel over ``sock``, once the peer that calls :func:`accept` proved the secret.

    Raises:
        AuthenticationError: it did not within ``timeout`` seconds; ``sock`` is closed.
    """
    with _handshake(sock, timeout):
        _check(_read_exactly(sock, len(_MAGIC)), _MAGIC)
        theirs = _read_exactly(sock, _NONCE)
        mine = secrets.token_bytes(_NONCE)
        sock.sendall(mine + _proof(secret, b"connect", theirs, mine))
        _check(_read_exactly(sock, 32), _proof(secret, b"accept", theirs, mine))
    return Channel(sock)


@contextlib.contextmanager
def _handshake(sock: socket.socket, timeout: float) -> Iterator[None]:
    sock.settimeout(timeout)
    try:
        yield
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


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return data
