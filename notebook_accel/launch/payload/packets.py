"""Puts pickled values (calls, results) into messages, and takes them out again.

    Packed --pack--> (wire.Packet, descriptors) ==channel==> unpack --> Packed

A small value is copied into the message. A large value is written to one memory segment
(system/segment.py), whose descriptor is sent with the message: all processes of a machine share one
copy, mapped copy-on-write. A channel to another machine sends the segment's bytes, and the receiver
makes a segment of them (transport/frames.py). Code that packs or unpacks is the same in both cases.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from notebook_accel import wire
from notebook_accel.system import segment

# Up to this size a value is copied into the message that it belongs to. For a small value the ten
# system calls of a segment cost more than the copies.
MAX_INLINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Packed:
    """A pickled value; the memory of its tensors and arrays is outside of the pickle (out of band).

    Attributes:
        buffers: first a pickle: of a call, the sources of the notebook cells that define its
            functions, and what ranks do before they unpickle it; of a result, the numbers of the
            notebook's objects in it. Then the memory of each tensor and array; last, the pickle
            itself. All are contiguous views of bytes.
    """

    buffers: tuple[memoryview, ...] = ()


class Parcel:
    """A packet with its descriptors, which are closed by ``close``, or with this object."""

    def __init__(self, packet: wire.Packet, fds: Iterable[int] = ()) -> None:
        self.packet, self.fds = packet, tuple(fds)
        self.close = weakref.finalize(self, _close, self.fds)


def pack(packed: Packed) -> tuple[wire.Packet, tuple[int, ...]]:
    """Convert a pickled value into a packet (a field for a message) and descriptors.

    Returns:
        The packet, and the descriptor of its segment if it is large, which the caller closes.

    Raises:
        OSError: the machine is out of memory or of descriptors.
    """
    sizes = tuple(buffer.nbytes for buffer in packed.buffers)
    if sum(sizes) <= MAX_INLINE_BYTES:
        return wire.Packet(sizes=sizes, inline=tuple(map(bytes, packed.buffers))), ()
    return wire.Packet(sizes=sizes), (segment.seal(packed.buffers),)


def unpack(packet: wire.Packet, fds: Sequence[int]) -> Packed:
    """Return the pickled value of a received packet; the inverse of :func:`pack`.

    Raises:
        ValueError: buffers are missing, or the descriptor is no valid segment for them.
        OSError: the segment could not be mapped.
    """
    try:
        if fds:
            buffers = segment.attach(fds[0], packet.sizes)
        else:
            buffers = tuple(memoryview(bytearray(part)) for part in packet.inline)
    finally:
        _close(fds)
    if len(buffers) != len(packet.sizes):
        raise ValueError(f"a packet of {len(packet.sizes)} buffers came with {len(buffers)}")
    return Packed(buffers)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
