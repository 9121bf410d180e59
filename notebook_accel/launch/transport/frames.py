"""A channel to another machine: it sends the bytes of files and memory segments, not descriptors.

On one machine a message carries a large value as the descriptor of a memory segment. To another
machine the segment's bytes are sent, as a numbered stream of frames between the other messages:

    sender                                               receiver
    post(message, [segment])
      StreamOpened(7, size)  ------------------------>   a new segment of that size
      message, "1 descriptor" ----------------------->   waits until stream 7 is whole
      Data(7, ...), while there is credit  ---------->   written into the segment
      more credit  <------ Credit(7, n)  -------------   ... for as much as was written
      Data(7, ..., last)  --------------------------->   sealed: the message, [segment]

So code that uses a channel is the same whether or not the peer is on the same machine. Credit is
the number of bytes that the receiver allows the sender to send. What waits in the queues::

    post, follow --> _sending[stream]   bytes that wait for the peer's credit, or for the socket
                 --> _outgoing          frames that the socket has no room for yet (Channel)
    ======================================= socket ========================================
    _incoming           bytes of a frame that is not whole yet (Channel)
    _coming[stream]     what was received of each stream that is not whole yet
    _announced          segments in the order in which they were announced, until the message comes
                        that they belong to: each message says how many segments it has
    _waiting[rank]      messages with segments that are not whole yet, and those behind them
    _ready              whole messages that ``drain`` read and ``receive`` has not given out yet

Invariants:

- A sender never sends more bytes of a stream than it has credit for, and reads them from the
  segment only when the socket has room. So a value of any size needs only a few frames of memory
  besides one copy at each end, and a message posted meanwhile waits for only one frame of each
  stream.
- The receiver returns messages about the same rank in the order in which they were posted: a
  message behind an incomplete one waits. The same holds among messages about no rank. Only ``Kill``
  overtakes others.

A file that grows, such as a rank's output, is sent the same way (:meth:`FramedChannel.follow`,
:meth:`FramedChannel.save`), but it belongs to no message and its size is not known.
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
from notebook_accel.launch.transport.channel import Channel, ProtocolError
from notebook_accel.system import segment
from notebook_accel.system.processes import is_readable

# Bytes of a stream in one frame: so many that headers cost nothing, and so few that a stop is not
# held up (2 ms at 1 Gbit/s).
_FRAME_BYTES = 1 << 18
# How many bytes of a stream may be sent that the receiver has not said it has written: what
# 1 Gbit/s carries in a round trip of 60 ms.
_WINDOW_BYTES = 8 << 20


@dataclass(kw_only=True)
class _SentStream:
    """A file or memory segment that is being sent.

    Attributes:
        fd: its descriptor, owned by the channel.
        size: in bytes; None while the file still grows.
        credit: number of bytes that the receiver allows to be sent now.
        sent: number of bytes sent so far.
    """

    fd: int
    size: int | None
    credit: int
    sent: int = 0


@dataclass(kw_only=True)
class _ComingStream:
    """A memory segment or growing file that is being received.

    Attributes:
        fd: descriptor to which its bytes are written; None for a file until
            :meth:`FramedChannel.save` names one.
        size: of a segment, in bytes; None for a file.
        received: number of bytes written so far.
        is_whole: whether all bytes have arrived.
    """

    fd: int | None
    size: int | None
    received: int = 0
    is_whole: bool = False


class FramedChannel(Channel):
    """A channel that sends memory segments and growing files as bytes.

    For connections between machines, where descriptors cannot travel: ``machine_link.py`` carries
    the bytes of the channel's socket, and notices a machine that is lost.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._numbers = itertools.count(1)
        self._sending: dict[int, _SentStream] = {}
        self._coming: dict[int, _ComingStream] = {}
        self._announced: deque[_ComingStream] = deque()
        self._waiting: dict[int | None, deque[tuple[wire.Message, list[_ComingStream]]]] = {}
        self._ready: deque[tuple[wire.Message, list[int]]] = deque()

    @property
    def is_idle(self) -> bool:
        # While something comes, there will be credit to send.
        return not (self._outgoing or self._sending or self.is_receiving)

    @property
    def is_receiving(self) -> bool:
        return bool(self._coming or self._waiting)

    # ---- out -------------------------------------------------------------------------------

    def _post(self, data: bytes, fds: tuple[int, ...]) -> None:
        for fd in fds:
            self._open(fd, size=os.fstat(fd).st_size, credit=_WINDOW_BYTES)
        self._queue(data, len(fds))

    def follow(self, fd: int) -> int:
        """Offer a growing file to the peer; return the number of its stream.

        Once the peer has called :meth:`save` for the stream, each :meth:`flush` sends the bytes
        that are new in the file. :meth:`end` ends the stream.
        """
        return self._open(os.dup(fd), size=None, credit=0)

    def end(self, stream: int) -> None:
        """End the stream of a file given to :meth:`follow`, at the file's present size."""
        with contextlib.suppress(KeyError):
            sending = self._sending[stream]
            sending.size = os.fstat(sending.fd).st_size

    def _open(self, fd: int, *, size: int | None, credit: int) -> int:
        stream = next(self._numbers)
        self._sending[stream] = _SentStream(fd=fd, size=size, credit=credit)
        self._queue(self._encode(wire.StreamOpened(stream=stream, size=size)))
        return stream

    def flush(self, *, block: bool = True) -> None:
        super().flush(block=block)
        # One frame a turn of each stream, so that a small value does not wait for a large one.
        while not self._outgoing and self._queue_frames():
            super().flush(block=block)

    def _queue_frames(self) -> bool:
        """Queue one frame of each stream with bytes and credit; return whether any is queued."""
        for stream, sending in list(self._sending.items()):
            wanted = min(sending.credit, _FRAME_BYTES)
            data = os.pread(sending.fd, wanted, sending.sent) if wanted > 0 else b""
            sending.sent += len(data)
            sending.credit -= len(data)
            is_last = sending.size is not None and sending.sent >= sending.size
            if data or is_last:
                self._queue(self._encode(wire.Data(stream=stream, data=data, last=is_last)))
            if is_last:
                os.close(self._sending.pop(stream).fd)
        return bool(self._outgoing)

    # ---- in --------------------------------------------------------------------------------

    def receive(self) -> tuple[wire.Message, list[int]]:
        while not self._ready:
            self._ready.extend(self.drain(limit=1))
            if not self._ready:
                # This waits, for writing too: a queued frame may be the credit that the peer waits
                # for.
                is_readable(self, None, or_writable=bool(self._outgoing))
        return self._ready.popleft()

    def drain(self, *, limit: int | None = None) -> list[tuple[wire.Message, list[int]]]:
        if self._ready:
            # Without reading as well: a read may find the end and raise, and these would be lost.
            ready = list(self._ready)
            self._ready.clear()
            return ready
        messages = super().drain(limit=limit)
        # Credit came, or is to be given. A write that fails raises nothing: that the peer is gone
        # is told by the read, after all that it had sent.
        with contextlib.suppress(OSError):
            self.flush(block=False)
        return messages

    def save(self, stream: int, fd: int) -> None:
        """Ask the peer for the file that it offers as ``stream``, and write its bytes to ``fd``.

        Args:
            fd: descriptor to write to; the channel closes it, also on an error.

        Raises:
            ProtocolError: the peer offers no file of that number, or it is being saved already.
        """
        coming = self._coming.get(stream)
        if coming is None or coming.fd is not None:
            os.close(fd)
            raise ProtocolError(f"no file comes as stream {stream}")
        coming.fd = fd
        self._queue(self._encode(wire.Credit(stream=stream, size=_WINDOW_BYTES)))

    def num_received(self, stream: int) -> int | None:
        """Return how many bytes of a file were received; None if it is complete or unknown."""
        coming = self._coming.get(stream)
        return None if coming is None else coming.received

    def _deliver(
        self, message: wire.Message, num_fds: int
    ) -> Iterator[tuple[wire.Message, list[int]]]:
        if isinstance(message, wire.StreamOpened):
            self._begin(message)
        elif isinstance(message, wire.Data):
            self._write(message)
            yield from self._whole()
        elif isinstance(message, wire.Credit):
            # For one that has ended meanwhile, there is nothing left to send.
            if message.stream in self._sending:
                self._sending[message.stream].credit += message.size
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
        coming = _ComingStream(fd=None, size=opened.size)
        if opened.size is not None:
            coming.fd = segment.create(opened.size)
            self._announced.append(coming)
        self._coming[opened.stream] = coming

    def _write(self, data: wire.Data) -> None:
        coming = self._coming.get(data.stream)
        if coming is None or coming.fd is None:
            raise ProtocolError(f"bytes came of stream {data.stream}, which nobody asked for")
        end = coming.received + len(data.data)
        if coming.size is not None and (end > coming.size or data.last != (end == coming.size)):
            raise ProtocolError(f"{end} bytes came of a segment of {coming.size}")
        try:
            view = memoryview(data.data)
            while view:
                view = view[os.write(coming.fd, view) :]
        except OSError as error:
            # A full disk costs the rest of a log, never the run; a value must be whole.
            if coming.size is not None:
                raise ProtocolError(
                    f"{coming.size:,} bytes that came have no room: {error}"
                ) from None
        coming.received = end
        if not data.last:
            self._queue(self._encode(wire.Credit(stream=data.stream, size=len(data.data))))
            return
        coming.is_whole = True
        del self._coming[data.stream]
        if coming.size is None:
            os.close(coming.fd)
        else:
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
        fds.update(fd for _, given in self._ready for fd in given)
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._sending.clear()
        self._coming.clear()
        self._waiting.clear()
        self._announced.clear()
        self._ready.clear()
