"""One end of a connection between two processes of a run: messages, with file descriptors.

A frame is a length, a number of file descriptors, and one message of ``wire.py``. A
:class:`Channel` is only made over a private socket pair, of which no other process has an end.

    send, post -> queue -> flush -> socket ===> socket -> drain, receive -> (message, descriptors)

A channel has no thread and no lock: code that shares one between threads must lock it. But it is
safe against signal handlers that raise in the middle of a write: the frame is not torn, and the
next write continues where that one stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Union

import msgspec

from notebook_accel import wire
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch.text.terminal_text import escaped

# ---- Messages as bytes: msgpack, decoded into the types of ``wire.py`` and nothing else.


_encoder = msgspec.msgpack.Encoder()
# The closed union of all messages: it is built once, before anybody could add one.
_decoder: msgspec.msgpack.Decoder[wire.Message] = msgspec.msgpack.Decoder(
    Union[tuple(wire.Message.__subclasses__())]
)


def encode(value: object) -> bytes:
    """Return a message, or a part of one, as msgpack; what UTF-8 cannot encode is escaped."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(escaped(msgspec.to_builtins(value, builtin_types=(bytes,))))


def decode(data: bytes | memoryview) -> wire.Message:
    """Return the message that ``data`` encodes.

    Raises:
        msgspec.DecodeError: the bytes are no valid message of this version of the protocol.
    """
    try:
        return _decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # which msgspec lets through
        raise msgspec.DecodeError(f"it cannot be read: {error}") from None


_HEADER = struct.Struct("!IB")
_FD = struct.Struct("i")
# What is larger is no message, but a length that was read from the middle of something else. No
# message has more than one descriptor today.
_MAX_FRAME = 1 << 30
_MAX_FDS = 8
# Bytes that are read at once; a socket of the system holds about as many.
_CHUNK = 1 << 18


class ProtocolError(NotebookAccelError):
    """Raised if a received message is invalid or unexpected, or a message to send is too large."""


class _Frame:
    """A queued frame, sent in one or more pieces; sending can resume after any exception.

    A signal handler of the user's may raise between any two Python instructions. So the code uses
    ``extend(map(f, ...))``, which runs ``f`` and stores its result inside of C, with no such gap:
    no byte is sent twice, and no descriptor is closed twice.
    """

    def __init__(self, data: bytes, fds: Sequence[int]) -> None:
        self._data = memoryview(data)
        # Lengths of the pieces that were sent.
        self._sent: list[int] = []
        self._fds = tuple(fds)
        self._unclosed = iter(self._fds)

    @property
    def is_sent(self) -> bool:
        return sum(self._sent) == len(self._data)

    def send(self, send: Callable[..., int], flags: int) -> None:
        start = sum(self._sent)
        rights = struct.pack(f"{len(self._fds)}i", *self._fds)
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if self._fds and not start else []
        self._sent.extend(map(send, [[self._data[start:]]], [beside], [flags]))
        # The first byte has taken the descriptors along.
        self.close()

    def close(self) -> None:
        """Close the frame's descriptors in this process; those already closed are left alone."""
        with contextlib.suppress(OSError):  # the user's code closed what it did not open
            deque(map(os.close, self._unclosed), maxlen=0)


@dataclass(kw_only=True)
class ReceivedLog:
    """A rank's log whose bytes another machine sends (``frames.py``).

    Attributes:
        fd: descriptor of the file to which they are written; None for one that cannot be written.
        start: bytes that the file had before.
        received: number of bytes that came.
        is_whole: whether all bytes have arrived.
    """

    fd: int | None = None
    start: int = 0
    received: int = 0
    is_whole: bool = False


class Channel:
    """Sends and receives messages with file descriptors over a connected unix socket.

    Attributes:
        heard: time in monotonic seconds at which bytes last arrived; at first, the time of
            creation.
        closed: whether :meth:`close` was called.
        logs: by rank, the log files that another machine sends (``frames.py``).
        open_log: opens the file of a rank for such a log, and returns its descriptor.
    """

    open_log: Callable[[int], int] | None = None

    def __init__(self, sock: socket.socket) -> None:
        # The notebook's `socket.setdefaulttimeout` makes each new socket one that does not block,
        # and that goes with its descriptor into another process.
        sock.setblocking(True)
        self._socket = sock
        self._incoming = bytearray()
        self._incoming_fds: deque[int] = deque()
        self._outgoing: deque[_Frame] = deque()
        self._end: EOFError | ProtocolError | None = None
        self._has_lost_fds = False
        self.heard = time.monotonic()
        self.closed = False
        self.logs: dict[int, ReceivedLog] = {}

    def fileno(self) -> int:
        """Return the socket's descriptor; the channel still owns it."""
        return self._socket.fileno()

    # ---- out -------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Number of queued frames that are not fully written to the socket yet."""
        return len(self._outgoing)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to send: no queued frame, no bytes of a file or segment."""
        return not self._outgoing

    @property
    def is_receiving(self) -> bool:
        """Whether a file or segment from the peer has arrived only in part.

        Always False here, since descriptors arrive at once; :class:`FramedChannel` sends bytes.
        """
        return False

    def post(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Queue a message, without writing it; :meth:`flush` writes it.

        Raises:
            ProtocolError: the message is larger than 1 GiB, the limit of the protocol.
        """
        # First: what cannot be encoded leaves no descriptor open.
        data = self._encode(message)
        self._post(message, data, tuple(map(os.dup, fds)))

    def hand_over(self, message: wire.Message, fds: Sequence[int]) -> None:
        """Queue a message like :meth:`post`, but own ``fds`` instead of duplicating them.

        The channel closes the descriptors once they are sent, or if the message cannot be queued.

        Raises:
            ProtocolError: the message is larger than 1 GiB, the limit of the protocol.
        """
        try:
            data = self._encode(message)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        self._post(message, data, tuple(fds))

    def _post(self, message: wire.Message, data: bytes, fds: tuple[int, ...]) -> None:
        """Queue a message, encoded, with its descriptors, which the channel owns from now on."""
        self._queue(data, len(fds), fds)

    def _queue(self, data: bytes, num_fds: int = 0, fds: tuple[int, ...] = ()) -> None:
        self._outgoing.append(_Frame(_HEADER.pack(len(data), num_fds) + data, fds))

    @staticmethod
    def _encode(message: wire.Message) -> bytes:
        data = encode(message)
        if len(data) > _MAX_FRAME:
            raise ProtocolError(
                f"a {type(message).__name__} of {len(data):,} bytes was to be sent; "
                f"a message has at most {_MAX_FRAME:,} bytes"
            )
        return data

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Write all queued messages and then this one; block until the socket has taken them.

        Raises:
            OSError: the peer is gone.
            ProtocolError: the message is larger than 1 GiB, the limit of the protocol.
        """
        self.post(message, fds)
        self.flush()

    def flush(self, *, block: bool = True) -> None:
        """Write the queued messages to the socket.

        Raises:
            OSError: the peer is gone.
        """
        flags = 0 if block else socket.MSG_DONTWAIT
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                frame = self._outgoing[0]
                if not frame.is_sent:
                    frame.send(self._socket.sendmsg, flags)
                if frame.is_sent:
                    frame.close()
                    self._outgoing.popleft()

    # ---- in --------------------------------------------------------------------------------

    def receive(self) -> tuple[wire.Message, list[int]]:
        """Wait for the next message; return it and its descriptors, which the caller must close.

        Raises:
            EOFError: the peer is gone.
            ProtocolError: the bytes that came are no valid message.
        """
        while True:
            for message in self._parse():
                return message
            if self._end is not None:
                raise self._end
            self._read(0)

    @property
    def has_ended(self) -> bool:
        """Whether the connection has ended: the peer is gone, or sent invalid bytes.

        Once all messages that came before were returned, :meth:`receive` and :meth:`drain` raise.
        """
        return self._end is not None

    def drain(self, *, limit: int | None = None) -> list[tuple[wire.Message, list[int]]]:
        """Return the messages that have arrived, without blocking; [] if there are none.

        Each comes with its descriptors, which the caller must close.

        Args:
            limit: stop reading from the socket once there are this many messages or more; None
                reads all that the peer has sent.

        Raises:
            EOFError: the peer is gone, and all messages that came from it were returned.
            ProtocolError: invalid bytes came, and all messages before them were returned.
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
            data, rights, marks, _ = self._socket.recvmsg(
                _CHUNK, socket.CMSG_SPACE(_MAX_FDS * _FD.size), flags
            )
        except (ConnectionResetError, TimeoutError):
            # A time-out is of whoever set one (template/process.py).
            data, rights, marks = b"", [], 0
        for _, kind, packed in rights:
            if kind == socket.SCM_RIGHTS:
                whole = packed[: len(packed) // _FD.size * _FD.size]
                self._incoming_fds.extend(fd for (fd,) in _FD.iter_unpack(whole))
        self._has_lost_fds |= bool(marks & socket.MSG_CTRUNC)
        if not data:
            self._end = EOFError("the other end of the channel is gone")
        self.heard = time.monotonic()
        self._incoming += data

    def _parse(self) -> Iterator[tuple[wire.Message, list[int]]]:
        try:
            while not isinstance(self._end, ProtocolError):
                if len(self._incoming) < _HEADER.size:
                    return
                length, num_fds = _HEADER.unpack_from(self._incoming)
                if length > _MAX_FRAME or num_fds > _MAX_FDS:
                    raise ProtocolError(f"a frame of {length} bytes and {num_fds} descriptors came")
                end = _HEADER.size + length
                if len(self._incoming) < end:
                    return
                body = bytes(memoryview(self._incoming)[_HEADER.size : end])
                del self._incoming[:end]
                yield from self._deliver(decode(body), num_fds)
        except msgspec.MsgspecError as error:
            self._end = ProtocolError(f"what came is no message: {error}")
        except ProtocolError as error:
            self._end = error

    def _deliver(
        self, message: wire.Message, num_fds: int
    ) -> Iterator[tuple[wire.Message, list[int]]]:
        """Yield the messages that can be returned now that ``message`` came, with descriptors."""
        if num_fds > len(self._incoming_fds):
            why = " (too many files are open here: ulimit -n)" if self._has_lost_fds else ""
            raise ProtocolError(
                f"a frame of {num_fds} descriptors came with {len(self._incoming_fds)}{why}"
            )
        yield message, [self._incoming_fds.popleft() for _ in range(num_fds)]

    # ---- end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket, and all descriptors that were received or queued but not passed on."""
        if self.closed:
            return
        self.closed = True
        for fd in self._incoming_fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        for frame in self._outgoing:
            frame.close()
        self._incoming_fds.clear()
        self._outgoing.clear()
        self._socket.close()
