"""How an agent brings ranks about by fork: one process each, a child of the agent."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch.multiprocessing as mp

from notebook_accel.launch.agent.file_tail import FileTail
from notebook_accel.launch.agent.gauges import gauges_of
from notebook_accel.launch.agent.rank_process import RankProcess
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.worker import main as worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accel.launch import wire
    from notebook_accel.launch.agent.logs import RankLogs
    from notebook_accel.launch.agent.ports import RunPorts
    from notebook_accel.launch.agent.rank_process import Process
    from notebook_accel.launch.transport.scoreboard import Scoreboard

__all__ = ["Shared", "StartRanks", "start_ranks"]


class StartRanks(Protocol):
    """Starts all ranks of an agent; they get ready for calls by themselves."""

    def __call__(
        self,
        launch: wire.Launch,
        *,
        board: Scoreboard,
        logs: RankLogs,
        ports: RunPorts,
        unneeded: Sequence[int],
    ) -> list[RankProcess]:
        """Start them.

        Args:
            launch: what the kernel sent.
            board: where they count.
            logs: where their output goes.
            ports: where they meet each other.
            unneeded: descriptors of the agent, which they close.
        """


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What an agent shares with one rank, from before that is started.

    Attributes:
        spec: which rank it is.
        ours, theirs: the ends of the channel.
        log: descriptor of the file for its output; this process needs none.
        tail: reads that file.
        stacks: descriptor of the file for dumps of its stacks.
        disconnect: eventfd by which it is told to shut down its connections.
    """

    spec: wire.RankSpec
    ours: socket.socket
    theirs: socket.socket
    log: int
    tail: FileTail
    stacks: int
    disconnect: int

    @classmethod
    def with_rank(cls, spec: wire.RankSpec, logs: RankLogs) -> Shared:
        """Open all of it."""
        ours, theirs = socket.socketpair()
        log = logs.open(spec.rank)
        tail = FileTail(logs.path(spec.rank))
        tail.skip()  # the output of the attempt before, where ranks are started again
        return cls(
            spec=spec,
            ours=ours,
            theirs=theirs,
            log=log,
            tail=tail,
            stacks=os.memfd_create(f"stacks-{spec.rank}"),
            disconnect=os.eventfd(0),
        )

    def inherited(
        self,
        launch: wire.Launch,
        *,
        board: Scoreboard,
        ports: RunPorts,
        store_socket: socket.socket | None,
        unneeded: tuple[int, ...],
    ) -> worker.Inherited:
        """What the rank has of it, and of the agent."""
        return worker.Inherited(
            agent_pid=os.getpid(),
            launch=launch,
            spec=self.spec,
            master_port=ports.master_number,
            store_socket=store_socket,
            channel=Channel(self.theirs),
            board=board,
            log=self.log,
            stacks=self.stacks,
            disconnect=self.disconnect,
            unneeded=unneeded,
        )

    def rank_process(
        self, process: Process, launch: wire.Launch, *, board: Scoreboard
    ) -> RankProcess:
        """The rank as the agent sees it, once ``process`` has started; closes the rank's ends."""
        self.theirs.close()
        os.close(self.log)
        return RankProcess(
            rank=self.spec.rank,
            process=process,
            channel=Channel(self.ours),
            tail=self.tail,
            stacks=self.stacks,
            disconnect=self.disconnect,
            row=board.row(self.spec.local_rank),
            gauges=gauges_of(launch, self.spec, process.pid),
        )


def start_ranks(
    launch: wire.Launch,
    *,
    board: Scoreboard,
    logs: RankLogs,
    ports: RunPorts,
    unneeded: Sequence[int],
) -> list[RankProcess]:
    """Fork a process for each rank, as :class:`StartRanks` says."""
    ranks: list[RankProcess] = []
    for spec in launch.ranks:
        of_others = [fd for rank in ranks for fd in rank.descriptors()]
        ranks.append(
            _fork_rank(
                spec,
                launch,
                board=board,
                logs=logs,
                ports=ports,
                unneeded=(*unneeded, *of_others),
            )
        )
    return ranks


def _fork_rank(
    spec: wire.RankSpec,
    launch: wire.Launch,
    *,
    board: Scoreboard,
    logs: RankLogs,
    ports: RunPorts,
    unneeded: Sequence[int],
) -> RankProcess:
    """Fork the process of one rank; it gets ready for calls by itself.

    Args:
        spec: which rank it is.
        launch: what it has in common with the others.
        board: where it counts.
        logs: where its output goes.
        ports: where it meets the others.
        unneeded: descriptors that it closes.
    """
    shared = Shared.with_rank(spec, logs)
    inherited = shared.inherited(
        launch,
        board=board,
        ports=ports,
        store_socket=ports.store,
        unneeded=(*unneeded, shared.ours.fileno()),
    )
    context = mp.get_context("fork")
    process = context.Process(target=worker.main, args=(inherited,), name=f"rank-{spec.rank}")
    process.start()
    return shared.rank_process(process, launch, board=board)
