"""A pool and calls on it, with the agents' ends of real connections in the hands of the test."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from notebook_accel import wire
from notebook_accel.config import LaunchConfig
from notebook_accel.launch import payload, run_list
from notebook_accel.launch.control.call import NewCall, RankCall
from notebook_accel.launch.control.metrics_file import MetricStore
from notebook_accel.launch.control.pool import AgentEnd, AgentLink, RankPool
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.control.run_state import RunState, starting
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.payload import pack
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.view import View

RUN = "r"
# Wide enough for a busy machine.
SECONDS = 30.0


class PlayedAgent:
    """The agent's end of a connection; ``killed`` is set once the pool has ended it."""

    def __init__(self, *ranks: int) -> None:
        ours, theirs = socket.socketpair()
        self.killed = threading.Event()
        # The pool's thread kills, and the test's may be in the middle of a message.
        self._speaking = threading.Lock()
        self.socket = theirs
        self.channel = Channel(theirs)
        self._ranks = ranks
        self.link = AgentLink(
            channel=Channel(ours),
            ranks=tuple(ranks),
            how_it_ended=lambda: AgentEnd("was killed by SIGKILL"),
            kill=self._be_killed,
        )

    def _be_killed(self) -> None:
        self.killed.set()
        with self._speaking:
            self.channel.close()

    def next(self) -> wire.Message:
        message, fds = self.channel.receive()
        for fd in fds:
            os.close(fd)
        return message

    def tell(self, kind: type[wire.Message], /, **fields: Any) -> None:
        """Say something, about the first call if nothing else is given."""
        with self._speaking:
            self.channel.send(kind(**{"run": RUN, "call": 1, **fields}))

    def get_ready(self) -> None:
        pids = {rank: 1000 + rank for rank in self._ranks}
        self.tell(wire.AgentReady, call=0, pids=pids)
        for rank in self._ranks:
            self.tell(wire.RankReady, call=0, rank=rank)

    def return_all(self, call: int = 1) -> None:
        """Every rank returns its own number."""
        for rank in self._ranks:
            packet, fds = pack(payload.pack_result(rank, None))
            assert not fds
            self.tell(wire.Returned, call=call, rank=rank, value=packet)

    def end_all(self) -> None:
        for rank in self._ranks:
            self.tell(wire.RankEnded, call=0, rank=rank, exitcode=0)


class DrawnStates(View):
    def __init__(self) -> None:
        self.drawn: list[tuple[float, RunState]] = []
        self.closed: list[RunState] = []

    def update(self, state: RunState) -> None:
        self.drawn.append((time.monotonic(), state))

    def close(self, state: RunState) -> None:
        self.closed.append(state)


@dataclass
class PlayedRun:
    """A pool that listens, and the agents that it listens to."""

    pool: RankPool
    agents: tuple[PlayedAgent, ...]
    folder: RunFolder
    view: DrawnStates = field(default_factory=DrawnStates)

    @property
    def agent(self) -> PlayedAgent:
        """The agent of a run that has one."""
        (agent,) = self.agents
        return agent

    def begin_call(
        self, *, last: bool = False, timeout: float | None = None, advise: bool = False
    ) -> RankCall:
        call = self.new_call(timeout, advise=advise)
        message = wire.BeginCall(payload=wire.Packet(), grace=0.1, last=last)
        self.pool.send_call(call, message, ())
        return call

    def new_call(self, timeout: float | None = None, **asked: Any) -> RankCall:
        """A call that was not sent; ``asked`` are fields of its record."""
        world_size = len(self.pool.processes)
        first = starting(run=RUN, name="train", world_size=world_size, started=time.time())
        new = NewCall(
            request=LaunchRequest(
                config=LaunchConfig(), view=self.view, **{"advise": False, **asked}
            ),
            state=replace(first, timeout=timeout),
            folder=self.folder,
            metrics=MetricStore(self.folder.path),
            handle=partial(run_list.expression_now, self.folder.id),
        )
        return RankCall(self.pool, payload.pack_call(len, ([],)), new)


@contextlib.contextmanager
def played(root: Path, *agents: PlayedAgent) -> Iterator[PlayedRun]:
    folder = RunFolder.make(root)
    pool = RankPool([agent.link for agent in agents], run=RUN, grace=0.1, log_dir=folder.path)
    pool.start()
    for agent in agents:
        agent.get_ready()
    try:
        yield PlayedRun(pool=pool, agents=agents, folder=folder)
    finally:
        for agent in agents:
            agent.channel.close()
        assert pool.ended.wait(SECONDS), "the pool ends with its agents"
