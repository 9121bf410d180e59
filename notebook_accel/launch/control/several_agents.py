"""What the kernel keeps while it passes on what the agents of a run must know of each other.

Call, and what follows it --> the agent of rank 0: its ranks meet at a port --> PortReserved
PortReserved --> the call with that port, and what followed it --> the other agents

Stop --> all agents --StopPointReached--> the highest point of all --LeaveAt--> all agents
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

__all__ = ["MessagesForOthers", "StopAnswers"]


class MessagesForOthers:
    """Messages for the agents without rank 0, from a call on until its port is known.

    What follows a call that these agents do not have yet must not overtake it: a Stop or DumpStacks
    would be taken for one about the call before. Kill ends them whatever they are in.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[wire.Message, tuple[int, ...]]] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a call was sent whose port is not known yet."""
        return self._waiting is not None

    def begin_call(self) -> None:
        """A call is about to be sent: from now on messages wait."""
        self._waiting = []

    def keep(self, message: wire.Message, fds: Sequence[int]) -> bool:
        """Whether the message waits here; its descriptors are duplicated then."""
        if self._waiting is None or isinstance(message, wire.Kill):
            return False
        self._waiting.append((message, tuple(map(os.dup, fds))))
        return True

    def release(self, port: int) -> Iterator[tuple[wire.Message, tuple[int, ...]]]:
        """The messages that waited, the call with its port; closes their descriptors in the end."""
        waiting, self._waiting = self._waiting or [], None
        try:
            for message, fds in waiting:
                is_call = isinstance(message, wire.BeginCall)
                change = {"master_port": port} if is_call else {}
                yield msgspec.structs.replace(message, **change), fds
        finally:
            _close(waiting)

    def drop(self) -> None:
        """Nobody is to get them any more."""
        waiting, self._waiting = self._waiting or [], None
        _close(waiting)


def _close(waiting: Iterable[tuple[wire.Message, tuple[int, ...]]]) -> None:
    for fd in (fd for _, fds in waiting for fd in fds):
        os.close(fd)


class StopAnswers:
    """The agents' answers to a stop. An agent is known by the numbers of its ranks."""

    def __init__(self) -> None:
        self._points: dict[tuple[int, ...], StopPoint] = {}

    def note(self, agent: tuple[int, ...], answer: wire.StopPointReached) -> None:
        """An agent has answered."""
        self._points[agent] = StopPoint(
            batches=answer.batches, reads=answer.reads, reads_should_stop=answer.reads_should_stop
        )

    def leave_point(self, agents: Iterable[tuple[int, ...]]) -> LeavePoint | None:
        """Where all ranks leave, told once: when each of these agents has answered."""
        points = [self._points.get(agent) for agent in agents]
        known = [point for point in points if point is not None]
        if not known or len(known) < len(points):
            return None
        self._points.clear()
        return leave_after(known)

    def clear(self) -> None:
        """The call has ended: no agent owes an answer any more."""
        self._points.clear()
