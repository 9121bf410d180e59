"""Ranks as processes of this machine: template -> agent -> ranks."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from notebook_accel.config import check_enough_devices
from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch.control.agent_link import AgentLink
from notebook_accel.launch.control.environment import ON_CPU, WITHOUT_DEVICES
from notebook_accel.launch.engines.base import AgentEngine, RankPlan
from notebook_accel.launch.system import processes, scratch
from notebook_accel.launch.template.handle import template
from notebook_accel.launch.transport.handshake import AuthenticationError, connect, new_secret

if TYPE_CHECKING:
    from notebook_accel.launch import wire
    from notebook_accel.launch.engines.base import Start
    from notebook_accel.launch.template.handle import Template

__all__ = ["LocalEngine", "fork_agent"]

_EXIT_SECONDS = 0.3


class LocalEngine(AgentEngine):
    """Forks of a clean process, on the CPU or one an accelerator."""

    description = "engine='local', whose ranks are on one machine"

    def warm_up(self, job: Start) -> None:
        source = template(job.environment)
        if not source.is_ready:
            job.view.expect(job.name)
        source.wait_until_ready()

    def plan_ranks(self, job: Start) -> RankPlan:
        wanted = job.config.num_processes
        if job.config.devices == "cpu":
            return RankPlan.of_sizes(wanted or 1, environment={**ON_CPU, **WITHOUT_DEVICES})
        available = _num_devices(job)
        _check_chosen(job.config.devices, available)
        if not available:
            notices = () if wanted else (_ASK_FOR_MORE,)
            return RankPlan.of_sizes(wanted or 1, environment=ON_CPU, notices=notices)
        if wanted is not None and job.config.backend != "gloo":
            check_enough_devices(wanted, available)
        return RankPlan.of_sizes(wanted or available)

    def start_agents(self, job: Start, plan: RankPlan, *, run: str) -> list[AgentLink]:
        (ranks,) = plan.agents
        ours, theirs = socket.socketpair()
        return [fork_agent(job, ranks, ours, theirs, run=run, sees_files=True)]


def fork_agent(
    job: Start,
    ranks: tuple[wire.RankSpec, ...],
    ours: socket.socket,
    theirs: socket.socket,
    *,
    run: str,
    sees_files: bool,
) -> AgentLink:
    """Have the template fork an agent.

    Args:
        job: names the environment, and so the template.
        ranks: those that the agent is to start.
        ours, theirs: two ends of a connection, to which the link and the agent take.
        run: id of the run or session.
        sees_files: whether the agent may write into the run's folder.

    Raises:
        LaunchError: it could not be forked, or did not answer; both sockets are closed.
    """
    source = template(job.environment)
    secret = new_secret()
    try:
        with theirs:
            pid = source.fork_agent(theirs, run=run, secret=secret)
        channel = connect(ours, secret)
    except AuthenticationError as error:
        raise LaunchError(f"the agent of the run (pid {pid}) did not start: {error}") from None
    except BaseException:
        # An agent that was forked all the same ends when its channel does.
        ours.close()
        raise
    return AgentLink(
        channel=channel,
        ranks=ranks,
        sees_files=sees_files,
        how_it_ended=lambda: _how_it_ended(source, pid),
        kill=lambda: _end(pid, run),
    )


def _end(agent: int, run: str) -> None:
    """End an agent with all that it had, also where neither it nor its template can any more."""
    processes.kill_tree([agent])
    killed = processes.kill_leftovers(session=agent, variable=("NOTEBOOK_ACCEL_RUN", run))
    scratch.remove(run, used_by=killed)


_ASK_FOR_MORE = (
    "no accelerator is visible: 1 rank on the CPU; num_processes=2 would train on two ranks "
    "(%%accelerate -n 2 in a cell)"
)


def _check_chosen(devices: object, available: int) -> None:
    if isinstance(devices, tuple) and len(devices) > available:
        raise ConfigError(
            f"devices={list(devices)}, but of these the machine has {available or 'none'}: choose "
            "others, or devices='cpu', or leave it out for all that are visible"
        )


def _num_devices(job: Start) -> int:
    devices = template(job.environment).count_devices(job.environment)
    return 0 if devices.kind == "cpu" else len(devices.names)


def _how_it_ended(source: Template, pid: int) -> str:
    code = None
    with contextlib.suppress(LaunchError):
        code = source.exit_of(pid, timeout=_EXIT_SECONDS)
    if code is None:
        return f"(pid {pid}) is gone"
    if code < 0:
        return f"(pid {pid}) was killed by {processes.signal_name(-code)}"
    return f"(pid {pid}) ended with exit code {code}"
