"""Engine for several machines, which join the run with ``notebook-accel join``.

    notebook, machine 0                              machines 1, 2, ...
    MachineServer: address, token  <----- join ----  a template, ready to fork
    start_agents: template -> agent     StartMachineAgent --> template -> agent
    RankPool <====== channel ======> agent
             <====== channel ======= machine_link.py ======> agent

Each other machine has one connection to the notebook. Its agent (the helper process that starts and
watches the ranks of a machine) works as on the notebook's machine, and the kernel conducts the run
as with ``local.py``. torch's own rendezvous (c10d) is not used: the notebook knows the connected
machines already, and a c10d store can be written by everybody on the network.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

import msgspec
import psutil

from notebook_accel import wire
from notebook_accel.config import LaunchConfig, shares_devices
from notebook_accel.config.checks import check_enough
from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch.control.pool import AgentLink
from notebook_accel.launch.engines import Engine, RankPlan
from notebook_accel.launch.engines.local import LocalEngine, await_imports, fork_agent
from notebook_accel.launch.engines.machines import (
    JoinedMachine,
    MachinesEngine,
    interface_of,
    interface_variables,
    notices_of,
    own_addresses,
    torchelastic_variables,
)
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.rank_environment import num_cores
from notebook_accel.launch.slurm import OtherNodes, has_other_nodes
from notebook_accel.launch.template.handle import Template, ask_template
from notebook_accel.launch.transport import machine_link
from notebook_accel.system.modules import import_path
from notebook_accel.system.processes import kept_environment

# Until all machines have joined: a person walks to another screen and copies a command.
_JOIN_SECONDS = 600.0
_POLL_SECONDS = 0.05
# The notebook waits a minute for the agent.
_IMPORTS_SECONDS = 40.0
# What a machine that joined says at the end.
_OUTCOMES = {
    "succeeded": "the run has ended: it succeeded",
    "stopped": "the run has ended: it was stopped",
    "failed": "the run has failed: the notebook says why",
    "ended": "the session has ended",
}
_LOST = (
    "the notebook is lost: its kernel was killed or restarted, its machine was switched off, or "
    "the network is down"
)


# ---- The engine ----------------------------------------------------------------------------


class ElasticEngine(MachinesEngine):
    """Engine with ranks on this machine and on others that join (``engine="elastic"``).

    The other machines join with the command ``notebook-accel join``, which the launch shows to
    the user or, inside a Slurm job, has ``srun`` run on the other nodes. With ``num_nodes=1`` no
    other machine is needed. Unlike with ``engine="local"``, failed ranks can be restarted
    (``max_restarts``).
    """

    description = "engine='elastic', which finds its machines by `notebook-accel join`"
    unused = tuple({*Engine.unused} - {"master_addr", "rdzv_endpoint"})

    def __init__(self) -> None:
        super().__init__()
        self._here = LocalEngine()

    def warm_up(self, request: LaunchRequest) -> None:
        self._here.warm_up(request)

    def num_awaited(self, config: LaunchConfig) -> int:
        return config.num_nodes * (config.num_processes or 1) if config.num_nodes > 1 else 0

    def plan_ranks(self, request: LaunchRequest) -> RankPlan:
        wanted = request.config.num_nodes - 1
        return self._plan_on(self._gather(request, wanted) if wanted else [], request)

    def _plan_on(self, machines: list[JoinedMachine], request: LaunchRequest) -> RankPlan:
        config, self._machines = request.config, machines
        here = self._here.plan_ranks(request)
        if not machines:
            return replace(here, environment={**here.environment, **torchelastic_variables(config)})
        sizes = [_num_ranks(machine.info, config, here) for machine in self._machines]
        # Of an interface of this machine, which the host name in master_addr does not say.
        address = self._machines[0].link.own_address
        common = {
            **here.environment,
            "MASTER_ADDR": config.master_addr or address,
            # use_port is where machines join.
            "MASTER_PORT": "0",
            **torchelastic_variables(config),
            **interface_variables(interface_of(address), request.environment),
        }
        plan = RankPlan.of_sizes(here.world_size, *sizes, environment=common)
        return replace(plan, notices=notices_of(self._machines))

    def _gather(self, request: LaunchRequest, wanted: int) -> list[JoinedMachine]:
        """Wait until the other machines have joined; an interrupt ends the wait."""
        host, nodes = request.config.master_addr, None
        server = self._listen(host or "", request.config.use_port or 0, wanted)
        if has_other_nodes(os.environ, wanted):
            address = f"{host or os.environ['SLURMD_NODENAME']}:{server.port}"
            join_it = [sys.executable, "-m", "notebook_accel", "join", address]
            nodes = OtherNodes(join_it, wanted, {"NOTEBOOK_ACCEL_JOIN_TOKEN": str(server.token)})
            how = ", which srun starts"
        else:
            host, *others = [host] if host else own_addresses()
            also = f"\n(other addresses of this machine: {', '.join(others)})" if others else ""
            how = (
                f". Run there:\n    NOTEBOOK_ACCEL_JOIN_TOKEN={server.token} notebook-accel join "
                f"{host}:{server.port}{also}"
            )
        said, deadline = None, time.monotonic() + _JOIN_SECONDS
        try:
            while True:
                machines = list(server.machines)
                missing = wanted - len(machines)
                joined = ", ".join(machine.who for machine in machines)
                state = joined, server.refused
                if state != said:
                    said = state
                    # Who has joined is read before any rank starts there.
                    parts = [f"{joined} joined"] if joined else []
                    if missing:
                        more = f"{missing} more machine{'s' * (missing > 1)}"
                        refused = f"\n({server.refused})" if server.refused else ""
                        parts.append(f"waits for {more}{how}{refused}")
                    request.view.waits_for_machines(f"{request.name}: {'; '.join(parts)}")
                if not missing:
                    return machines
                if nodes is not None and nodes.said is not None:
                    raise LaunchError(
                        f"srun ended before {wanted} other nodes of the job had joined. It wrote:\n"
                        f"{nodes.said.strip()[-2000:]}"
                    )
                if time.monotonic() >= deadline:
                    raise LaunchError(
                        f"{len(machines) + 1} of {wanted + 1} machines were there after "
                        f"{_JOIN_SECONDS:g} s: launch again, and run on each other machine the "
                        "command that is shown"
                    )
                request.poll()
                time.sleep(_POLL_SECONDS)
        except BaseException:
            if nodes is not None:
                nodes.end()
            raise

    def start_here(self, request: LaunchRequest, plan: RankPlan, *, run: str) -> list[AgentLink]:
        return self._here.start_agents(request, replace(plan, agents=plan.agents[:1]), run=run)


def _num_ranks(info: wire.MachineJoined, config: LaunchConfig, here: RankPlan) -> int:
    """Return how many ranks another machine that joined gets."""
    if config.devices == "cpu":
        return config.num_processes or 1
    is_on_cpu = here.environment.get("ACCELERATE_USE_CPU") == "true"
    if is_on_cpu != (not info.devices):
        one, other = ("none", "some") if is_on_cpu else ("some", "none")
        raise ConfigError(
            f"this machine has {one} accelerators and {info.host} has {other}: ranks of one "
            "launch train on the same kind; devices='cpu' leaves them all out"
        )
    if info.devices and config.num_processes and not shares_devices(config):
        check_enough(config.num_processes, len(info.devices), f"{info.host} has fewer")
    return config.num_processes or len(info.devices) or 1


# ---- On the other machines -----------------------------------------------------------------


def join(
    address: str, token: str, *, tell: Callable[[str], None] | None = None, num_ranks: int = 0
) -> int:
    """Join this machine to a run of a notebook; return once the run has ended.

    ``notebook-accel join`` calls it. A KeyboardInterrupt ends the ranks on this machine, and with
    them the run.

    Args:
        tell: called with each message for the user; None writes them to ``sys.stderr``.
        num_ranks: number of ranks of this machine if the engine is "ray"; 0 if it is "elastic",
            with which the notebook decides the number.
    """
    host, port = parse_address(address)
    given = machine_link.Token.of_text(token)
    say = tell or (lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    environment = kept_environment()
    # Before the connection: nobody waits for imports then.
    found = ask_template(environment, lambda source: source.count_devices(environment))
    info = wire.MachineJoined(
        host=socket.gethostname(),
        user=psutil.Process().username(),
        python=platform.python_version(),
        torch=version("torch"),
        environment=environment,
        directory=os.getcwd(),
        path=tuple(import_path()),
        num_cores=num_cores(),
        interface="",
        devices=found.names,
        num_ranks=num_ranks,
    )
    return machine_link.await_from_thread(_be_guest(host, port, given, info, say))


def parse_address(text: str) -> tuple[str, int]:
    """Return (host, port) of a text ``HOST:PORT``; brackets around an IPv6 address are removed."""
    host, _, port = text.strip().rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65_536
    # As long as a name of a host, and of each part of it, may be.
    is_host = 0 < len(host) < 254 and all(len(part) < 64 for part in host.split("."))
    if not (is_host and is_port):
        raise ConfigError(f"{text[:100]!r}: expected HOST:PORT, as the notebook shows it")
    return host.strip("[]"), int(port)


async def _be_guest(
    host: str,
    port: int,
    token: machine_link.Token,
    info: wire.MachineJoined,
    say: Callable[[str], None],
) -> int:
    """Connect to the notebook, and start and end an agent here when it asks; return once it ends.

    Returns:
        The exit code of ``notebook-accel join``: 1 if the run has failed, or the notebook is lost.
    """
    try:
        link = await machine_link.open_link(host, port, token)
    except (OSError, asyncio.TimeoutError) as error:
        raise LaunchError(
            f"no notebook waits at {host}:{port} ({error or 'no answer'}): is its launch "
            "waiting still, and does a firewall let this machine through?"
        ) from None
    requests: asyncio.Queue[wire.Message | None] = asyncio.Queue()
    serving = asyncio.ensure_future(link.serve(requests.put_nowait))
    serving.add_done_callback(lambda _: requests.put_nowait(None))
    link.send(msgspec.structs.replace(info, interface=interface_of(link.own_address)))
    say(f"joined {host}:{port}; waiting for the notebook")
    agent: AgentLink | None = None
    passing: asyncio.Task[None] | None = None
    outcome = ""
    try:
        while (message := await requests.get()) is not None:
            if isinstance(message, wire.MachineRefused):
                raise LaunchError(f"the notebook refused this machine: {message.text}")
            if isinstance(message, wire.MachineReleased):
                outcome = _OUTCOMES[message.outcome]
            elif isinstance(message, wire.StartMachineAgent):
                try:
                    agent = await asyncio.to_thread(_fork_agent, message)
                except LaunchError as error:
                    link.send(wire.MachineAgentStarted(error=str(error)))
                    continue
                sock = socket.socket(fileno=os.dup(agent.channel.fileno()))
                agent.channel.close()
                relaying = await link.attach(sock)
                is_there = os.path.isdir(message.directory)
                directory = message.directory if is_there else os.getcwd()
                link.send(wire.MachineAgentStarted(directory=directory))
                passing = asyncio.ensure_future(_report_end(link, agent, relaying))
                say("an agent has started: the ranks here train")
            elif isinstance(message, wire.EndMachineAgent) and passing is not None:
                link.detach()
                await passing
    finally:
        link.abort()
        if agent is not None:
            await asyncio.to_thread(agent.end)
    say(outcome or _LOST)
    return int(outcome in ("", _OUTCOMES["failed"]))


async def _report_end(
    link: machine_link.MachineLink, agent: AgentLink, relaying: asyncio.Task[None]
) -> None:
    """Tell the notebook how an agent has ended, once nothing of its channel is left."""
    await relaying
    end = await asyncio.to_thread(agent.how_it_ended)
    await asyncio.to_thread(agent.end)
    assert end is not None
    link.send(wire.MachineAgentEnded(how=end.how, traceback=end.traceback))


def _fork_agent(message: wire.StartMachineAgent) -> AgentLink:
    if message.imports:
        wanted = wire.Import(
            items=message.imports, environment=message.environment, path=message.path
        )

        def prepare(source: Template) -> None:
            source.import_soon(wanted)
            await_imports(source, seconds=_IMPORTS_SECONDS)

        ask_template(message.environment, prepare)
    how = {"is_prepared": bool(message.imports), "is_remote": True}
    return fork_agent(message.environment, (), run=message.run, **how)
