"""How an agent brings ranks about by fork: one process each, a child of the agent."""

from __future__ import annotations

import os
import socket
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
    from notebook_accel.launch.transport.scoreboard import Scoreboard

__all__ = ["StartRanks", "start_ranks"]


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
    ours, theirs = socket.socketpair()
    log = logs.open(spec.rank)
    tail = FileTail(logs.path(spec.rank))
    tail.skip()  # the output of the attempt before, where ranks are started again
    stacks = os.memfd_create(f"stacks-{spec.rank}")
    disconnect = os.eventfd(0)
    inherited = worker.Inherited(
        agent_pid=os.getpid(),
        launch=launch,
        spec=spec,
        master_port=ports.master_number,
        store_socket=ports.store,
        channel=Channel(theirs),
        board=board,
        log=log,
        stacks=stacks,
        disconnect=disconnect,
        unneeded=(*unneeded, ours.fileno()),
    )
    context = mp.get_context("fork")
    process = context.Process(target=worker.main, args=(inherited,), name=f"rank-{spec.rank}")
    process.start()
    theirs.close()
    os.close(log)
    return RankProcess(
        rank=spec.rank,
        process=process,
        channel=Channel(ours),
        tail=tail,
        stacks=stacks,
        disconnect=disconnect,
        row=board.row(spec.local_rank),
        gauges=gauges_of(launch, spec, process.pid),
    )
