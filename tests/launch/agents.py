"""The kernel's part, played by hand: real agents and ranks at the other end of real channels."""

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from notebook_accel import wire
from notebook_accel.launch import payload
from notebook_accel.launch.template.handle import template
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.transport.frames import FramedChannel
from tests.engines.processes import below
from tests.waiting import eventually

# Wide enough for a busy machine.
SECONDS = 60.0


class AgentByHand:
    """An agent of the shared template, which has been sent nothing yet; ``heard`` is in order."""

    def __init__(self, log_dir: Path | None) -> None:
        self.run = uuid4().hex
        self.heard: list[wire.Message] = []
        self._log_dir = log_dir
        self._calls = 0
        ours, theirs = socket.socketpair()
        is_remote = log_dir is None
        with theirs:
            self.pid = template().fork_agent(theirs, run=self.run, is_remote=is_remote)
        # A channel waits for ever; here a read that takes so long fails.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(SECONDS), 0))
        self.channel = FramedChannel(ours) if is_remote else Channel(ours)
        self.channel.open_log = lambda _: os.open(os.devnull, os.O_WRONLY)

    def launch(self, num_ranks: int, **fields: Any) -> wire.AgentReady:
        given: dict[str, Any] = {
            "run": self.run,
            "world_size": num_ranks,
            "ranks": tuple(range(num_ranks)),
            "environment": {**os.environ, "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"},
            "directory": os.getcwd(),
            "path": tuple(sys.path),
            "log_dir": None if self._log_dir is None else str(self._log_dir),
            "num_threads": 1,
        }
        self.channel.send(wire.Launch(**{**given, **fields}))
        return self.wait_for(wire.AgentReady)

    def call(self, function: Callable[..., Any], *args: Any, **fields: Any) -> int:
        self._calls += 1
        parcel = payload.pack_call(function, args).parcel
        given = {"run": self.run, "call": self._calls, "payload": parcel.packet, "grace": 10.0}
        self.channel.send(wire.BeginCall(**{**given, **fields}), parcel.fds)
        return self._calls

    def say(self, kind: type[wire.Message], /, **fields: Any) -> None:
        self.channel.send(kind(**{"run": self.run, "call": self._calls, **fields}))

    def wait_for(self, kind: type[wire.M], number: int = 1) -> wire.M:
        """The last of the first so many messages of this kind."""
        return self.all_of(kind, number)[-1]

    def all_of(self, kind: type[wire.M], number: int) -> list[wire.M]:
        """The first so many messages of this kind, waiting for those that are still to come."""
        found: list[wire.M] = []
        for message in self._messages():
            if isinstance(message, kind):
                found.append(message)
                if len(found) == number:
                    break
        return found

    def until_its_end(self) -> list[wire.Message]:
        with contextlib.suppress(EOFError):
            for _ in self._messages():
                pass
        return self.heard

    def _messages(self) -> Iterator[wire.Message]:
        yield from tuple(self.heard)
        while True:
            message, fds = self.channel.receive()
            for fd in fds:
                os.close(fd)
            self.heard.append(message)
            yield message

    @property
    def alive(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def close(self) -> None:
        ranks = [process.pid for process in below(self.pid)]
        self.channel.close()
        eventually(lambda: not self.alive, what="the agent ended")
        eventually(lambda: not any(map(psutil.pid_exists, ranks)), what="its ranks ended")


@contextlib.contextmanager
def agent_by_hand(log_dir: Path) -> Iterator[AgentByHand]:
    agent = AgentByHand(log_dir)
    try:
        yield agent
    finally:
        agent.close()
