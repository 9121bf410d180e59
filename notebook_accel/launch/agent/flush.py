"""The last thing that an agent does: it sends the kernel all that is still to be sent."""

from __future__ import annotations

import contextlib
import selectors
import time
from typing import TYPE_CHECKING

from notebook_accel.launch.transport.channel import ProtocolError

if TYPE_CHECKING:
    from notebook_accel.launch.transport.channel import Channel

__all__ = ["flush_to_kernel"]

# How long the last messages wait for a kernel that does not read.
_FLUSH_SECONDS = 1200.0


def flush_to_kernel(channel: Channel, kernel: int) -> None:
    """Write all that is queued; a kernel that does not read loses it after a while.

    Args:
        channel: to the kernel.
        kernel: becomes readable when the kernel's process is gone: nobody will read then.
    """
    deadline = time.monotonic() + _FLUSH_SECONDS
    with (
        contextlib.suppress(OSError, EOFError, ProtocolError),
        selectors.DefaultSelector() as selector,
    ):
        selector.register(kernel, selectors.EVENT_READ)
        selector.register(channel.fileno(), selectors.EVENT_READ)
        channel.flush(block=False)
        while not channel.is_idle and time.monotonic() < deadline:
            # Always wait to read as well: the kernel may have to grant more credit (frames.py).
            # Wait to write only while frames are queued, or select would return at once.
            wanted = selectors.EVENT_WRITE if channel.num_pending else 0
            selector.modify(channel.fileno(), selectors.EVENT_READ | wanted)
            if any(key.fd == kernel for key, _ in selector.select(1.0)):
                return
            channel.drain()
            channel.flush(block=False)
