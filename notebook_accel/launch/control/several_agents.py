"""State that the kernel needs to coordinate a run with several agents, one on each machine.

The agent of rank 0 chooses the MASTER_PORT, so the other agents get a call only once it is known:

    BeginCall and later messages --> agent of rank 0 --PortReserved--> kernel
    BeginCall with that port, and the later messages --> the other agents
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from notebook_accel import wire


class MessagesForOthers:
    """Queue of messages for the agents without rank 0, until the MASTER_PORT of a call is known.

    It holds the call itself and all later messages: an agent that got a Stop or DumpStacks before
    its call would apply it to the previous call. Only Kill is not held back, since it ends the
    ranks in any case.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[wire.Message, tuple[int, ...]]] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether messages are held back, since the port of the newest call is not known yet."""
        return self._waiting is not None

    def begin_call(self) -> None:
        """Start holding messages back; called just before a call is sent."""
        self._waiting = []

    def keep(self, message: wire.Message, fds: Sequence[int]) -> bool:
        """Queue a message if messages are held back; return whether it was queued.

        Queued file descriptors are duplicates: the caller still closes its own. If the result is
        False, the caller sends the message at once.
        """
        if self._waiting is None or isinstance(message, wire.Kill):
            return False
        self._waiting.append((message, tuple(map(os.dup, fds))))
        return True

    def release(self, port: int) -> Iterator[tuple[wire.Message, tuple[int, ...]]]:
        """Yield the queued messages with their file descriptors, for the agents without rank 0.

        From now on messages are not held back. The descriptors are closed after the last message.
        """
        waiting, self._waiting = self._waiting or [], None
        try:
            for message, fds in waiting:
                is_call = isinstance(message, wire.BeginCall)
                change = {"master_port": port} if is_call else {}
                yield msgspec.structs.replace(message, **change), fds
        finally:
            _close(waiting)

    def drop(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        _close(waiting)


def _close(waiting: Iterable[tuple[wire.Message, tuple[int, ...]]]) -> None:
    for fd in (fd for _, fds in waiting for fd in fds):
        os.close(fd)
