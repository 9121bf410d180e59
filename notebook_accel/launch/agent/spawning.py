"""Starts an agent's ranks by ``xmp.spawn`` of torch_xla, for TPUs.

    agent --fork--> leader: takes the notebook's environment, imports torch_xla
                      `-- xmp.spawn --fork--> a process for each chip, a thread of it for each rank

``xmp.spawn`` decides which process has which rank. Each rank tells the agent the pid of its process
(``RankReady``), and the agent watches that process from then on. Results and errors do not go
through ``xmp.spawn``: each rank has its own channel to the agent. The leader sees its children end,
and writes their exit codes to a pipe that the agent reads.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib import import_module
from multiprocessing.context import ForkProcess
from typing import Any

import torch.multiprocessing as mp

from notebook_accel import tpu
from notebook_accel.errors import LaunchError
from notebook_accel.launch.agent.rank_process import RankProcess
from notebook_accel.launch.worker.main import Inherited, enter_notebook
from notebook_accel.launch.worker.streams import redirect
from notebook_accel.launch.worker.threads import Host
from notebook_accel.system.processes import is_readable

# pid and exit code of a process of ranks, negative for a signal.
_DEATH = struct.Struct("ii")
# The leader tells of an end at once; on a machine with too much work, a little later.
_DEATH_SECONDS = 5.0
# Modules by commas that the leader imports after torch_xla: tests replace there what torch_xla
# lacks on the CPU.
_MODULES = "NOTEBOOK_ACCEL_XLA_MODULES"


def start_ranks(ranks: Iterable[RankProcess], unneeded: Sequence[int]) -> list[RankProcess]:
    """Start the leader process, which starts the processes of the ranks by ``xmp.spawn``."""
    ranks = list(ranks)
    heard, told = os.pipe()
    ours = [rank.channel.fileno() for rank in ranks]
    # torch_xla has a store of its own.
    inherited = {rank.rank: replace(rank.inherited, store_socket=None) for rank in ranks}
    leader = _Leader(
        heard, target=_lead, args=(inherited, told, (*unneeded, heard, *ours)), name="xla-leader"
    )
    leader.start()
    os.close(told)
    for rank in ranks:
        rank.follow(leader)
    return ranks


# ---- in the agent


class _Leader(ForkProcess):
    """The leader process, whose children run the ranks as threads.

    The agent reads the exit codes of those children from the leader's pipe, ``deaths``: it cannot
    wait for processes that are not its own children.
    """

    def __init__(self, deaths: int, **how: Any) -> None:
        super().__init__(**how)
        self._deaths = deaths
        self._exit_codes: dict[int, int] = {}

    def exit_code_of(self, pid: int) -> int | None:
        """Return the exit code of a child that has ended, negative for a signal.

        None if the agent cannot learn it within five seconds.
        """
        deadline = time.monotonic() + _DEATH_SECONDS
        while pid not in self._exit_codes:
            if not is_readable(self._deaths, max(0.0, deadline - time.monotonic())):
                return None
            told = os.read(self._deaths, _DEATH.size)
            if not told:  # the leader is gone, and its children are the agent's now
                with contextlib.suppress(ChildProcessError):
                    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                return None
            self._exit_codes.update([_DEATH.unpack(told)])
        return self._exit_codes[pid]


# ---- in the leader, and in the processes that it forks

_inherited: dict[int, Inherited] = {}
_host: Host
_told: int


def _lead(inherited: dict[int, Inherited], told: int, unneeded: Sequence[int]) -> None:
    """Run the leader process: spawn the processes of the ranks, and exit once they have ended."""
    global _host, _told
    _inherited.update(inherited)
    first = next(iter(inherited.values()))
    _host, _told = Host(first.agent_pid), told
    for fd in unneeded:
        os.close(fd)
    redirect(first.log, on_lost=lambda _: None)
    context: Any = mp.get_context("fork")
    context.Process = _HostProcess
    try:
        os.environ.clear()
        os.environ.update(first.launch.environment)
        for name in tpu.LEFTOVERS:
            # torch_xla keeps what it finds, and would start fewer ranks than there are devices.
            os.environ.pop(name, None)
        enter_notebook(first.launch)
        import_module("torch_xla")
        for name in filter(None, os.environ.get(_MODULES, "").split(",")):
            import_module(name)
        xmp = import_module("torch_xla.distributed.xla_multiprocessing")
        # With 1 torch_xla takes one device and no other process; it knows no other number.
        xmp.spawn(_run_rank, nprocs=1 if len(inherited) == 1 else None, start_method="fork")
    except BrokenProcessPool:
        pass  # a process died: whoever watches the ranks was told how
    except Exception as error:  # whatever it is, the first call of each rank tells of it
        _serve_failing(error)
    sys.exit(_host.finish())


def _run_rank(ordinal: int) -> None:
    """Serve one rank in this thread until there are no more calls; called by ``xmp.spawn``."""
    runtime = import_module("torch_xla.runtime")
    number = int(runtime.world_size())
    num_here = min(number, int(runtime.addressable_runtime_device_count()))
    _host.serve(_inherited[ordinal % len(_inherited)], num_here, lambda: _check_world(number))


def _check_world(number: int) -> None:
    if number != len(_inherited):
        raise LaunchError(
            f"the XLA runtime has {number} devices, and {len(_inherited)} ranks were planned: "
            f"launch with num_processes=None, and see whether {tpu.DEVICE_VARIABLES} say otherwise"
        )


def _serve_failing(error: Exception) -> None:
    """Serve all ranks as threads of the leader, since ``xmp.spawn`` failed with ``error``."""

    def fail() -> None:
        raise error

    number = len(_inherited)
    with ThreadPoolExecutor(number) as threads:
        told = [threads.submit(_host.serve, one, number, fail) for one in _inherited.values()]
    for one in told:  # what fails once more is written to the log
        one.result()


class _HostProcess(ForkProcess):
    """The class of the processes in the pool of ``xmp.spawn``, whose threads are the ranks.

    A thread of the leader waits for each such process, to write its exit code to the agent's pipe.
    """

    def start(self) -> None:
        super().start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        assert self.pid is not None
        # Without reaping it: that is the pool's.
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        os.write(_told, _DEATH.pack(self.pid, code))

    def run(self) -> None:
        global _host
        _host = Host(os.getppid())
        super().run()
        sys.exit(_host.finish())

    # The pool asks and joins, and so reaps: not before the watcher has seen the end.

    def is_alive(self) -> bool:
        return self._watcher.is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._watcher.join(timeout)
        super().join(timeout)

    def terminate(self) -> None:
        """Do nothing: when one process dies, the agent ends the others, and the pool need not."""
