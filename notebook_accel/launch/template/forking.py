"""Forks of a template: a child that says what ended it, and one that is an agent."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Mapping

from notebook_accel import wire
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.transport.frames import FramedChannel
from notebook_accel.system import processes, scratch

# What stands around a child's traceback on standard error.
_FAILED, _END = "process {} failed\n", "\n== end of the traceback"


def fork(act: Callable[[], object]) -> int:
    """Fork a child that calls ``act`` and exits; return its pid.

    If ``act`` raises, the child prints the traceback to standard error and exits with code 1.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        processes.reset_signals()
        act()
        code = 0
    except BaseException:  # the process ends here: the kernel reads what it was
        # In one write: another child may fail at the same time.
        os.write(2, f"{_FAILED.format(os.getpid())}{traceback.format_exc()}{_END}\n".encode())
    finally:
        os._exit(code)


def traceback_of(pid: int, output: str) -> str:
    """Return the traceback of the exception that ended a child; "" if no exception ended it.

    Called in the kernel.
    """
    _, found, text = output.rpartition(_FAILED.format(pid))
    return text.partition(_END)[0] if found else ""


def end_everything(runs: Mapping[int, str] | None = None) -> None:
    """Kill all descendants, remove the scratch files of the agents, and exit this process.

    Called when the kernel's process has ended.

    Args:
        runs: for each agent's pid, the id of its run; None for no agents.
    """
    reaped = processes.kill_descendants()
    for agent, run in (runs or {}).items():
        scratch.remove(run, agent, used_by=reaped)
    os._exit(0)


def run_agent(message: wire.ForkAgent, fd: int, kernel: int) -> None:
    """Run the agent of a run in this process, in a session of its own."""
    from notebook_accel.launch import agent

    os.setsid()
    # The template, which would end this process with the kernel, may be gone itself.
    with processes.acting_on_exit(kernel, end_everything):
        channel = (FramedChannel if message.is_remote else Channel)(socket.socket(fileno=fd))
        first = channel.receive()
    agent.main(channel, kernel, first)
