"""Whether there is something to read from a descriptor, or room to write to it."""

from __future__ import annotations

import select
from typing import Protocol

__all__ = ["is_readable"]


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def is_readable(
    source: int | _HasDescriptor, seconds: float | None = 0.0, *, or_writable: bool = False
) -> bool:
    """Whether there is something to read, or an end to see, before the time is over.

    By poll(2), which works where no file can be opened any more: an epoll needs a descriptor.

    Args:
        source: a descriptor, or what has one.
        seconds: how long is waited; None for no limit.
        or_writable: whether room to write counts too.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN | (select.POLLOUT if or_writable else 0))
    return bool(poll.poll(None if seconds is None else 1000 * seconds))
