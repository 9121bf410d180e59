"""A channel to another machine: it sends the bytes of files and memory segments, not descriptors.

On one machine a message carries a large value as the descriptor of a memory segment. To another
machine the segment's bytes go before the message, as frames of their own::

    sender                                               receiver
    post(message, [segment])
      Data(...), while the socket has room  --------->   written into a new segment
      Data(..., last)  ------------------------------>   sealed
      message, "1 descriptor" ----------------------->   the message, [segment]

So code that uses a channel is the same whether or not the peer is on the same machine. Messages
about one rank, and those about none, come in the order in which they were posted. Messages without
segments pass a large value of another rank, which may take minutes: a stop, say, or the steps of
ranks that still train. ``Kill`` passes all. A sender reads bytes from a segment only when the
socket has room, so that a value of any size needs only a frame of memory besides one copy at each
end.

The log of a rank, a file that grows, is sent in the same way between all other frames
(:meth:`FramedChannel.follow`): its ``Data`` bear the number of the rank. The receiver opens its own
file for it (``Channel.open_log``).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from notebook_accel import wire
from notebook_accel.launch.transport.channel import Channel, ProtocolError, ReceivedLog
from notebook_accel.system import segment

# Bytes in one frame: so many that headers cost nothing, and so few that what passes a value is not
# held up (2 ms at 1 Gbit/s).
_FRAME_BYTES = 1 << 18


@dataclass(kw_only=True)
class _SentFile:
    """A log or memory segment that is being sent.

    Attributes:
        fd: its descriptor, owned by the channel.
        size: in bytes; None while the file still grows.
        sent: number of bytes sent so far.
    """

    fd: int
    size: int | None = None
    sent: int = 0


class FramedChannel(Channel):
    """A channel that sends memory segments and growing files as bytes.

    For connections between machines, where descriptors cannot travel: ``machine_link.py`` carries
    the bytes of the channel's socket, and notices a machine that is lost. A segment that was
    received whole waits for its message in ``_incoming_fds``, as a descriptor does in a
    :class:`Channel`.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        # Messages behind the socket's queue, each with its rank, the number of its segments, and
        # those of them that are not sent yet.
        self._line: deque[tuple[int | None, bytes, int, deque[_SentFile]]] = deque()
        # By rank, its log.
        self._followed: dict[int, _SentFile] = {}
        # What is received now.
        self._segment: int | None = None

    @property
    def num_pending(self) -> int:
        return len(self._outgoing) + len(self._line)

    @property
    def is_idle(self) -> bool:
        return not (self.num_pending or self._followed)

    @property
    def is_receiving(self) -> bool:
        is_of_message = self._segment is not None or self._incoming_fds
        return bool(is_of_message) or not all(log.is_whole for log in self.logs.values())

    # ---- out -------------------------------------------------------------------------------

    def _post(self, message: wire.Message, data: bytes, fds: tuple[int, ...]) -> None:
        is_behind = any(rank == message.rank for rank, *_ in self._line)
        if not fds and (isinstance(message, wire.Kill) or not is_behind):
            self._queue(data)
            return
        segments = deque(_SentFile(fd=fd, size=os.fstat(fd).st_size) for fd in fds)
        self._line.append((message.rank, data, len(fds), segments))

    def follow(self, rank: int, fd: int) -> None:
        """Send the growing log of a rank: at each :meth:`flush` what is new in it."""
        self._followed[rank] = _SentFile(fd=os.dup(fd))
        # The receiver waits for the end of each log that has begun.
        self._queue(self._encode(wire.Data(rank=rank, data=b"")))

    def end(self, rank: int) -> None:
        """End the log of a rank, at the file's present size."""
        log = self._followed[rank]
        log.size = os.fstat(log.fd).st_size

    def flush(self, *, block: bool = True) -> None:
        super().flush(block=block)
        least = 1
        while not self._outgoing and self._queue_frames(least):
            super().flush(block=block)
            least = _FRAME_BYTES  # or a rank that prints all the time would keep this from its end

    def _queue_frames(self, least: int) -> bool:
        """Queue the next messages or a part of a segment, and a part of each log that has grown.

        Returns:
            Whether there was any.
        """
        while self._line:
            _, data, num_segments, segments = self._line[0]
            if segments:
                if self._queue_part(segments[0]):
                    segments.popleft()
                break
            self._queue(data, num_segments)
            self._line.popleft()
        for rank, log in list(self._followed.items()):
            if self._queue_part(log, rank=rank, least=least):
                del self._followed[rank]
        return bool(self._outgoing)

    def _queue_part(self, file: _SentFile, *, rank: int | None = None, least: int = 0) -> bool:
        """Queue the next bytes of a file; return whether these are its last, and close it then.

        Nothing is queued of a file that grows and has fewer than ``least`` new bytes.
        """
        data = os.pread(file.fd, _FRAME_BYTES, file.sent)
        if file.size is None and len(data) < least:
            return False
        file.sent += len(data)
        is_last = file.size is not None and file.sent >= file.size
        self._queue(self._encode(wire.Data(rank=rank, data=data, last=is_last)))
        if is_last:
            os.close(file.fd)
        return is_last

    # ---- in --------------------------------------------------------------------------------

    def _deliver(
        self, message: wire.Message, num_fds: int
    ) -> Iterator[tuple[wire.Message, list[int]]]:
        if not isinstance(message, wire.Data):
            yield from super()._deliver(message, num_fds)
        elif message.rank is None:
            self._write_segment(message)
        else:
            self._write_log(message, message.rank)

    def _write_segment(self, data: wire.Data) -> None:
        if self._segment is None:
            self._segment = segment.create(0)
        try:
            _write(self._segment, data.data)
        except OSError as error:
            raise ProtocolError(f"bytes that came have no room: {error}") from None
        if data.last:
            segment.finish(self._segment)
            self._incoming_fds.append(self._segment)
            self._segment = None

    def _write_log(self, data: wire.Data, rank: int) -> None:
        if self.open_log is None:
            raise ProtocolError("a log came, which nobody asked for")
        is_new, log = rank not in self.logs, self.logs.setdefault(rank, ReceivedLog())
        # A full disk costs a log, or the rest of it, never the run.
        with contextlib.suppress(OSError):
            if is_new:
                log.fd = self.open_log(rank)
                log.start = os.fstat(log.fd).st_size
            if log.fd is not None:
                _write(log.fd, data.data)
        log.received += len(data.data)
        log.is_whole = data.last
        if data.last and log.fd is not None:
            os.close(log.fd)
            log.fd = None

    # ---- end -------------------------------------------------------------------------------

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        unsent = [file for *_, segments in self._line for file in segments]
        fds = [file.fd for file in (*unsent, *self._followed.values())]
        for fd in (*fds, self._segment, *(log.fd for log in self.logs.values())):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._line.clear()
        self._followed.clear()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
