"""A channel to another machine: it sends the bytes of files and memory segments, not descriptors.

On one machine a message carries a large value as the descriptor of a memory segment. To another
machine the segment's bytes are sent, as a numbered stream of frames between the other messages:

    sender                                               receiver
    post(message, [segment])
      StreamOpened(7, size)  ------------------------>   a new segment of that size
      message, "1 descriptor" ----------------------->   waits until stream 7 is whole
      Data(7, ...), while the socket has room  ------>   written into the segment
      Data(7, ..., last)  --------------------------->   sealed: the message, [segment]

So code that uses a channel is the same whether or not the peer is on the same machine. What waits
in the queues::

    post, follow --> _sending[stream]   bytes that wait for the socket
                 --> _outgoing          frames that the socket has no room for yet (Channel)
    ======================================= socket ========================================
    _incoming           bytes of a frame that is not whole yet (Channel)
    _coming[stream]     what was received of each stream that is not whole yet
    _announced          segments in the order in which they were announced, until the message comes
                        that they belong to: each message says how many segments it has
    _waiting[rank]      messages with segments that are not whole yet, and those behind them

Invariants:

- A sender reads bytes from the segment only when the socket has room. So a value of any size needs
  only a few frames of memory besides one copy at each end, and a message posted meanwhile waits for
  only one frame of each stream, and for what the sockets on the way hold.
- The receiver returns messages about the same rank in the order in which they were posted: a
  message behind an incomplete one waits. The same holds among messages about no rank. Only ``Kill``
  overtakes others.

The log of a rank, a file that grows, is sent the same way (:meth:`FramedChannel.follow`), but it
belongs to no message and its size is not known. The receiver opens its own file for it
(``Channel.open_log``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from notebook_accel import wire
from notebook_accel.launch.transport.channel import Channel, ProtocolError, ReceivedStream
from notebook_accel.system import segment

# Bytes of a stream in one frame: so many that headers cost nothing, and so few that a stop is not
# held up (2 ms at 1 Gbit/s).
_FRAME_BYTES = 1 << 18


@dataclass(kw_only=True)
class _SentStream:
    """A file or memory segment that is being sent.

    Attributes:
        fd: its descriptor, owned by the channel.
        size: in bytes; None while the file still grows.
        sent: number of bytes sent so far.
    """

    fd: int
    size: int | None
    sent: int = 0


class FramedChannel(Channel):
    """A channel that sends memory segments and growing files as bytes.

    For connections between machines, where descriptors cannot travel: ``machine_link.py`` carries
    the bytes of the channel's socket, and notices a machine that is lost. ``receive`` is for its
    first message, which has no segment; later ones come by ``drain``.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._numbers = itertools.count(1)
        self._sending: dict[int, _SentStream] = {}
        # By rank, its log.
        self._followed: dict[int, _SentStream] = {}
        self._coming: dict[int, ReceivedStream] = {}
        self._announced: deque[ReceivedStream] = deque()
        self._waiting: dict[int | None, deque[tuple[wire.Message, list[ReceivedStream]]]] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._outgoing or self._sending)

    @property
    def is_receiving(self) -> bool:
        return bool(self._coming or self._waiting)

    # ---- out -------------------------------------------------------------------------------

    def _post(self, data: bytes, fds: tuple[int, ...]) -> None:
        for fd in fds:
            self._open(fd, size=os.fstat(fd).st_size)
        self._queue(data, len(fds))

    def follow(self, rank: int, fd: int) -> None:
        """Send the growing log of a rank: at each :meth:`flush` what is new in it."""
        self._followed[rank] = self._open(os.dup(fd), size=None, rank=rank)

    def end(self, rank: int) -> None:
        """End the stream of the log of a rank, at the file's present size."""
        sending = self._followed.pop(rank)
        sending.size = os.fstat(sending.fd).st_size

    def _open(self, fd: int, *, size: int | None, rank: int | None = None) -> _SentStream:
        stream = next(self._numbers)
        self._sending[stream] = sending = _SentStream(fd=fd, size=size)
        self._queue(self._encode(wire.StreamOpened(stream=stream, size=size, rank=rank)))
        return sending

    def flush(self, *, block: bool = True) -> None:
        super().flush(block=block)
        # One frame a turn of each stream, so that a small value does not wait for a large one.
        least = 1
        while not self._outgoing and self._queue_frames(least):
            super().flush(block=block)
            least = _FRAME_BYTES  # or a rank that prints all the time would keep this from its end

    def _queue_frames(self, least: int) -> bool:
        """Queue a frame of each stream, of a log with so many new bytes; return whether any is."""
        for stream, sending in list(self._sending.items()):
            data = os.pread(sending.fd, _FRAME_BYTES, sending.sent)
            if sending.size is None and len(data) < least:
                continue
            sending.sent += len(data)
            is_last = sending.size is not None and sending.sent >= sending.size
            if data or is_last:
                self._queue(self._encode(wire.Data(stream=stream, data=data, last=is_last)))
            if is_last:
                os.close(self._sending.pop(stream).fd)
        return bool(self._outgoing)

    # ---- in --------------------------------------------------------------------------------

    def _deliver(
        self, message: wire.Message, num_fds: int
    ) -> Iterator[tuple[wire.Message, list[int]]]:
        if isinstance(message, wire.StreamOpened):
            self._begin(message)
        elif isinstance(message, wire.Data):
            self._write(message)
            yield from self._whole()
        elif num_fds > len(self._announced):
            raise ProtocolError(
                f"a message with {num_fds} segments came after {len(self._announced)}"
            )
        elif num_fds or (message.rank in self._waiting and not isinstance(message, wire.Kill)):
            streams = [self._announced.popleft() for _ in range(num_fds)]
            self._waiting.setdefault(message.rank, deque()).append((message, streams))
            yield from self._whole()
        else:
            yield message, []

    def _begin(self, opened: wire.StreamOpened) -> None:
        if opened.stream in self._coming or (opened.size or 0) < 0:
            raise ProtocolError(f"stream {opened.stream} of {opened.size} bytes was opened")
        coming = ReceivedStream(fd=None, size=opened.size)
        if opened.size is not None:
            coming.fd = segment.create(opened.size)
            self._announced.append(coming)
        elif self.open_log is None or opened.rank is None:
            raise ProtocolError("a log came, which nobody asked for")
        else:
            with contextlib.suppress(OSError):  # a full disk costs a log, never the run
                coming.fd = self.open_log(opened.rank)
                coming.start = os.fstat(coming.fd).st_size
            self.logs[opened.rank] = coming
        self._coming[opened.stream] = coming

    def _write(self, data: wire.Data) -> None:
        coming = self._coming.get(data.stream)
        if coming is None:
            raise ProtocolError(f"bytes came of stream {data.stream}, which was not opened")
        end = coming.received + len(data.data)
        if coming.size is not None and (end > coming.size or data.last != (end == coming.size)):
            raise ProtocolError(f"{end} bytes came of a segment of {coming.size}")
        try:
            view = memoryview(data.data)
            while view and coming.fd is not None:
                view = view[os.write(coming.fd, view) :]
        except OSError as error:
            # A full disk costs the rest of a log, never the run; a value must be whole.
            if coming.size is not None:
                raise ProtocolError(
                    f"{coming.size:,} bytes that came have no room: {error}"
                ) from None
        coming.received = end
        if not data.last:
            return
        coming.is_whole = True
        del self._coming[data.stream]
        if coming.fd is not None and coming.size is None:
            os.close(coming.fd)
        elif coming.fd is not None:
            segment.finish(coming.fd)

    def _whole(self) -> Iterator[tuple[wire.Message, list[int]]]:
        """Yield the waiting messages that are complete, in order, with their descriptors."""
        for rank, queue in list(self._waiting.items()):
            while queue and all(stream.is_whole for stream in queue[0][1]):
                message, streams = queue.popleft()
                yield message, [one.fd for one in streams if one.fd is not None]
            if not queue:
                self._waiting.pop(rank, None)

    # ---- end -------------------------------------------------------------------------------

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        waiting = (streams for queue in self._waiting.values() for _, streams in queue)
        coming = [*self._coming.values(), *itertools.chain(*waiting)]
        fds = {s.fd for s in (*coming, *self._announced) if s.fd is not None}
        fds.update(sending.fd for sending in self._sending.values())
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._sending.clear()
        self._coming.clear()
        self._waiting.clear()
        self._announced.clear()
