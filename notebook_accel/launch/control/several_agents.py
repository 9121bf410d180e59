"""State that the kernel needs to coordinate a run with several agents, one on each machine.

The agent of rank 0 chooses the MASTER_PORT, so the other agents get a call only once it is known:

    BeginCall and later messages --> agent of rank 0 --PortReserved--> kernel
    BeginCall with that port, and the later messages --> the other agents

All ranks must leave a stopped call at the same batch, or at the same read of ``should_stop``. Each
agent answers a stop with the highest number of a batch and of a read that its ranks have passed;
the ranks leave at the highest number of all answers + 1:

    Stop --> all agents --StopPointReached--> kernel --LeaveAt--> all agents
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from notebook_accel.launch import wire
from notebook_accel.launch.transport.scoreboard import StopPoint, leave_after

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from notebook_accel.launch.transport.scoreboard import LeavePoint


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

        Args:
            port: the MASTER_PORT, which is written into the queued ``BeginCall``.
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
        """Discard the queued messages, and stop holding messages back."""
        waiting, self._waiting = self._waiting or [], None
        _close(waiting)


def _close(waiting: Iterable[tuple[wire.Message, tuple[int, ...]]]) -> None:
    for fd in (fd for _, fds in waiting for fd in fds):
        os.close(fd)


class StopAnswers:
    """Collects the agents' answers to a stop: how far the ranks of each agent have come.

    An agent is identified by the tuple of its ranks' numbers.
    """

    def __init__(self) -> None:
        self._points: dict[tuple[int, ...], StopPoint] = {}

    def note(self, agent: tuple[int, ...], answer: wire.StopPointReached) -> None:
        """Store an agent's answer: the furthest batch and ``should_stop`` read of its ranks."""
        self._points[agent] = StopPoint(
            batches=answer.batches,
            reads=answer.reads,
            begun=answer.begun,
            reads_should_stop=answer.reads_should_stop,
        )

    def leave_point(self, agents: Iterable[tuple[int, ...]]) -> LeavePoint | None:
        """Return the batch (or read of ``should_stop``) at which all ranks leave the call.

        Returns None while the answer of an agent is missing. When a point is returned, the answers
        are discarded, so that the ranks are told only once.

        Args:
            agents: the agents that still run, each as the tuple of its ranks' numbers.
        """
        points = [self._points.get(agent) for agent in agents]
        known = [point for point in points if point is not None]
        if not known or len(known) < len(points):
            return None
        self._points.clear()
        return leave_after(known)

    def clear(self) -> None:
        """Discard all answers; called when the call has ended."""
        self._points.clear()
