"""One end of a connection between two processes of a run: messages, and descriptors beside them.

A frame is a length, a number of file descriptors, and one message of ``wire.py``. A
:class:`Channel` exists only over a private socket pair, or after both ends have proved that they
know the run's secret (``handshake.py``).

    send, post -> queue -> flush -> socket ===> socket -> drain, receive -> (message, descriptors)

A channel has no thread and no lock: whoever shares one between threads locks it. But an exception
may come between any two steps of a write (a signal handler of the user's that raises): the frame
stays whole, and the next write goes on with it where this one stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING, Union

import msgspec

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launch import wire
from notebook_accel.launch.text.terminal_text import escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


__all__ = ["Channel", "ProtocolError", "decode", "encode"]


# ---- Messages as bytes: msgpack, decoded into the types of ``wire.py`` and nothing else.


_encoder = msgspec.msgpack.Encoder()
# The closed union of all messages: it is built once, before anybody could add one.
_decoder: msgspec.msgpack.Decoder[wire.Message] = msgspec.msgpack.Decoder(
    Union[tuple(wire.Message.__subclasses__())]
)


def encode(message: wire.Message) -> bytes:
    """Return the bytes of one message; characters that UTF-8 lacks are escaped."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(escaped(msgspec.to_builtins(message, builtin_types=(bytes,))))


def decode(data: bytes | memoryview) -> wire.Message:
    """Return the message that ``data`` encodes.

    Raises:
        msgspec.DecodeError: the bytes are no message of this version.
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
    """Raised if the peer sent bytes that are no valid message."""


class _Frame:
    """A frame that is being written; it can go on after an exception at any point.

    ``extend(map(f, ...))`` runs ``f`` and stores what it gave inside of C, without a step of Python
    in between, at which a signal handler could raise: no byte is sent twice, and no descriptor
    closed twice. That is why these lines look so odd.
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
        """Send the next piece by ``socket.sendmsg``, the descriptors with the first."""
        start = sum(self._sent)
        rights = struct.pack(f"{len(self._fds)}i", *self._fds)
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if self._fds and not start else []
        self._sent.extend(map(send, [[self._data[start:]]], [beside], [flags]))
        # The first byte has taken the descriptors along.
        self.close()

    def close(self) -> None:
        """Close the descriptors that are not closed yet."""
        with contextlib.suppress(OSError):  # the user's code closed what it did not open
            deque(map(os.close, self._unclosed), maxlen=0)


class Channel:
    """Sends and receives messages with file descriptors over a connected unix socket.

    Attributes:
        heard: when bytes came last, or the channel was made; monotonic seconds.
        closed: whether :meth:`close` was called.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._incoming = bytearray()
        self._incoming_fds: deque[int] = deque()
        self._outgoing: deque[_Frame] = deque()
        self._end: EOFError | ProtocolError | None = None
        self._has_lost_fds = False
        self.heard = time.monotonic()
        self.closed = False

    def fileno(self) -> int:
        """Return the socket's descriptor; the channel still owns it."""
        return self._socket.fileno()

    # ---- out -------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Number of frames that wait to be written."""
        return len(self._outgoing)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to send: no message, and no bytes of a file."""
        return not self._outgoing

    @property
    def is_receiving(self) -> bool:
        """Whether a file or segment of the peer has arrived in part only."""
        return False

    def post(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Queue a message; its descriptors are duplicated, so the caller still owns them.

        Raises:
            ProtocolError: it is larger than any message may be.
        """
        # First: what cannot be encoded leaves no descriptor open.
        data = self._encode(message)
        self._post(data, tuple(map(os.dup, fds)))

    def hand_over(self, message: wire.Message, fds: Sequence[int]) -> None:
        """Queue a message; the channel owns its descriptors from now on, and closes them.

        Unlike :meth:`post`, it duplicates no descriptor.

        Raises:
            ProtocolError: it is larger than any message may be.
        """
        try:
            data = self._encode(message)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        self._post(data, tuple(fds))

    def _post(self, data: bytes, fds: tuple[int, ...]) -> None:
        """Queue an encoded message with its descriptors."""
        self._queue(data, len(fds), fds)

    def _queue(self, data: bytes, num_fds: int = 0, fds: tuple[int, ...] = ()) -> None:
        """Queue one frame.

        Args:
            data: the encoded message.
            num_fds: how many descriptors belong to it, as its header says.
            fds: descriptors that travel with the frame, and are closed once it is sent; none where
                their files travel as streams (:class:`FramedChannel`).
        """
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
        """Write a message, and all that was queued before it; blocks.

        Raises:
            OSError: the peer is gone.
        """
        self.post(message, fds)
        self.flush()

    def flush(self, *, block: bool = True) -> None:
        """Write what is queued; without ``block`` only what the socket takes now.

        Raises:
            OSError: the peer is gone.
        """
        flags = 0 if block else socket.MSG_DONTWAIT
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                self._write_some(flags)

    def _write_some(self, flags: int) -> None:
        frame = self._outgoing[0]
        if not frame.is_sent:
            frame.send(self._socket.sendmsg, flags)
        if frame.is_sent:
            frame.close()
            self._outgoing.popleft()

    # ---- in --------------------------------------------------------------------------------

    def receive(self) -> tuple[wire.Message, list[int]]:
        """Return the next message and its descriptors, which the caller owns; blocks.

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

    @property
    def has_ended(self) -> bool:
        """Whether the connection has ended: reading raises once all messages were returned."""
        return self._end is not None

    def drain(self, *, limit: int | None = None) -> list[tuple[wire.Message, list[int]]]:
        """Return the messages that have arrived; does not block.

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
            data, rights, marks, _ = self._socket.recvmsg(
                _CHUNK, socket.CMSG_SPACE(_MAX_FDS * _FD.size), flags
            )
        except (ConnectionResetError, TimeoutError):
            # A time-out is the network's (nothing came back from a remote machine on what was
            # sent to it), or of whoever set one (template/process.py).
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
        """Yield the whole messages that were read; an invalid one ends the channel."""
        try:
            while not isinstance(self._end, ProtocolError):
                body, num_fds = self._next_frame()
                if body is None:
                    return
                yield from self._deliver(decode(body), num_fds)
        except msgspec.MsgspecError as error:
            self._end = ProtocolError(f"what came is no message: {error}")
        except ProtocolError as error:
            self._end = error

    def _next_frame(self) -> tuple[bytes | None, int]:
        """Return the next frame, None if it is not whole, and its number of descriptors."""
        if len(self._incoming) < _HEADER.size:
            return None, 0
        length, num_fds = _HEADER.unpack_from(self._incoming)
        if length > _MAX_FRAME or num_fds > _MAX_FDS:
            raise ProtocolError(f"a frame of {length} bytes and {num_fds} descriptors came")
        end = _HEADER.size + length
        if len(self._incoming) < end:
            return None, 0
        body = bytes(memoryview(self._incoming)[_HEADER.size : end])
        del self._incoming[:end]
        return body, num_fds

    def _deliver(
        self, message: wire.Message, num_fds: int
    ) -> Iterator[tuple[wire.Message, list[int]]]:
        """Yield the messages that are complete now that ``message`` has arrived."""
        if num_fds > len(self._incoming_fds):
            why = " (too many files are open here: ulimit -n)" if self._has_lost_fds else ""
            raise ProtocolError(
                f"a frame of {num_fds} descriptors came with {len(self._incoming_fds)}{why}"
            )
        yield message, [self._incoming_fds.popleft() for _ in range(num_fds)]

    def save(self, stream: int, fd: int) -> None:
        """Write the file that the peer sends as ``stream`` to ``fd``, which the channel closes.

        Raises:
            ProtocolError: the peer follows no file of that number.
        """
        os.close(fd)
        raise ProtocolError(f"no file comes as stream {stream}")

    def num_received(self, stream: int) -> int | None:
        """Number of bytes received of a file; None if it is complete or unknown."""
        del stream
        return None

    # ---- end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket and every descriptor that was not taken or sent."""
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
