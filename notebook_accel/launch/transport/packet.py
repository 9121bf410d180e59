"""How a pickled value travels in a message: the one codec for calls, results and exceptions.

    payload.Packed --pack--> (wire.Packet, descriptors) ==channel==> unpack --> payload.Packed

A small value lies in the message itself. A large one lies in one sealed memory segment, whose
descriptor goes along with the message: over a unix socket the descriptor itself travels, so that
all processes of a machine share one copy; a channel to another machine sends the segment's bytes
in frames, and makes a segment of them there (``frames.py``). Whoever packs or unpacks need not
know which of the two it was.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from notebook_accel.launch import wire
from notebook_accel.launch.payload import Packed
from notebook_accel.launch.transport.segment import attach, seal

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_INLINE_BYTES", "pack", "unpack"]

# Up to this size a value is copied into the message that it belongs to. A larger one lies in a
# memory segment beside its message: one copy for all ranks. For a small value the ten system calls
# of a segment cost more than the copies.
MAX_INLINE_BYTES = 1 << 16


def pack(packed: Packed) -> tuple[wire.Packet, tuple[int, ...]]:
    """Make ready to send.

    Args:
        packed: its buffers are copied, so they may be changed as soon as this returns.

    Returns:
        What goes into the message, and the descriptors that are sent with it. The caller closes
        them once the message is sent.

    Raises:
        OSError: the machine is out of memory or of descriptors.
    """
    header, buffers = packed.header, packed.buffers
    if len(header) > MAX_INLINE_BYTES:
        header, buffers = b"", (memoryview(header), *buffers)
    sizes = tuple(buffer.nbytes for buffer in buffers)
    if sum(sizes) <= MAX_INLINE_BYTES:
        return wire.Packet(header=header, sizes=sizes, inline=tuple(map(bytes, buffers))), ()
    return wire.Packet(header=header, sizes=sizes), (seal(buffers),)


def unpack(packet: wire.Packet, fds: Sequence[int]) -> Packed:
    """What :func:`pack` was given, as the process at the other end sees it.

    Args:
        packet: from the message.
        fds: the descriptors that came with the message; they are closed.

    Returns:
        The value. Its buffers are writable, and what is written stays in this process.

    Raises:
        ValueError: the packet is no whole value.
    """
    try:
        if fds:
            buffers = attach(fds[0], packet.sizes)
        else:
            buffers = tuple(memoryview(bytearray(part)) for part in packet.inline)
    finally:
        for fd in fds:
            os.close(fd)
    if len(buffers) != len(packet.sizes):
        raise ValueError(f"a packet of {len(packet.sizes)} buffers came with {len(buffers)}")
    if packet.header:
        return Packed(packet.header, buffers)
    # No header is empty itself: where it comes empty, the first buffer is the header.
    return Packed(bytes(buffers[0]) if buffers else b"", buffers[1:])
