"""Ranks on several machines: each lends itself to the run by one connection to the notebook.

    notebook, machine 0                              machines 1, 2, ...
    MachineServer: address, token  <----- join ----  a template, ready to fork
    start_agents: template -> agent     StartMachineAgent --> template -> agent
    RankPool <====== channel ======> agent
             <====== channel ======= machine_link.py ======> agent

What is behind an agent is the same on all machines, and what a run is, is the same as with
``local.py``. The machines that are connected are the rendezvous: torch's own (c10d) would be a
second one, by a store that everybody on the network can write to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from notebook_accel.config import shares_devices
from notebook_accel.config.checks import check_enough
from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch import wire
from notebook_accel.launch.control.agent_link import AgentEnd, AgentLink
from notebook_accel.launch.control.environment import (
    INTERFACES,
    ON_CPU,
    WITHOUT_DEVICES,
    kept_environment,
    num_cores,
    num_threads_of,
    rank_environment,
)
from notebook_accel.launch.engines.base import AgentEngine, RankPlan
from notebook_accel.launch.engines.local import LocalEngine, fork_agent, tcp_pair
from notebook_accel.launch.system.processes import import_path
from notebook_accel.launch.template.handle import ask_template
from notebook_accel.launch.transport.frames import FramedChannel
from notebook_accel.launch.transport.machine_link import (
    HANDSHAKE_SECONDS,
    MachineLink,
    Token,
    await_from_thread,
    check_proof,
    in_background,
    open_link,
    server_context,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.engines.base import StartRequest

__all__ = ["ElasticEngine", "join", "parse_address"]

# Until all machines have joined: a person walks to another screen and copies a command.
_JOIN_SECONDS = 600.0
# The machine has its template before it joins, and forks an agent in milliseconds.
_AGENT_SECONDS = 60.0
_POLL_SECONDS = 0.05
# How an agent ended is known once its template has reaped it.
_END_SECONDS = 5.0


# ---- In the notebook: a machine that has joined --------------------------------------------


class JoinedMachine:
    """Another machine, while it is connected. Its methods are for any thread but the links'."""

    def __init__(self, link: MachineLink, info: wire.MachineJoined) -> None:
        self.info = info
        self._link = link
        self._answers: asyncio.Queue[wire.MachineAgentStarted | None] = asyncio.Queue()
        self._end: AgentEnd | None = None
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._stays = True

    @property
    def name(self) -> str:
        """Its host name and address."""
        return f"{self.info.host} ({self._link.peer_address})"

    @property
    def own_address(self) -> str:
        """The address of this machine by which the other one reaches it."""
        return self._link.own_address

    @property
    def is_open(self) -> bool:
        """Whether it is connected."""
        return self._link.is_open

    def take(self, message: wire.Message) -> None:
        """Take what it says; called by its link."""
        if isinstance(message, wire.MachineAgentStarted):
            self._answers.put_nowait(message)
        elif isinstance(message, wire.MachineAgentEnded):
            how = f"on {self.name} {message.how}"
            self._end = AgentEnd(how, message.traceback)
            self._link.detach()
            self._is_idle.set()
            if not self._stays:
                self._link.close()

    def close_answers(self) -> None:
        """The connection has ended; called by its link."""
        self._answers.put_nowait(None)
        self._is_idle.set()

    def start_agent(
        self,
        ranks: tuple[wire.RankSpec, ...],
        fields: Callable[[str], Mapping[str, Any]],
        *,
        run: str,
    ) -> AgentLink:
        """Have it start an agent.

        Args:
            ranks: those that the agent is to start.
            fields: gives the machine's own fields of ``wire.Launch``, by the ranks' directory.
            run: id of the run or session.

        Raises:
            LaunchError: there is no agent.
        """
        ours, theirs = socket.socketpair()
        try:
            answer = await_from_thread(self._start(theirs, run), _AGENT_SECONDS)
        except TimeoutError:
            answer = wire.MachineAgentStarted(error=f"no answer in {_AGENT_SECONDS:g} s")
        if answer is None or answer.error:
            ours.close()
            why = "its connection ended" if answer is None else answer.error
            raise LaunchError(f"{self.name} started no agent: {why}. Launch again")
        return AgentLink(
            channel=FramedChannel(ours),
            ranks=ranks,
            sees_files=False,
            how_it_ended=self._how_it_ended,
            kill=self._abort,
            launch_fields=fields(answer.directory),
        )

    async def _start(self, theirs: socket.socket, run: str) -> wire.MachineAgentStarted | None:
        self._end = None
        self._is_idle.clear()
        passing = await self._link.attach(theirs)
        passing.add_done_callback(self._end_agent)
        self._link.send(wire.StartMachineAgent(run=run, directory=os.getcwd()))
        return await self._answers.get()

    def _end_agent(self, _: asyncio.Task[None]) -> None:
        """The run has closed its channel."""
        if self._stays:
            self._link.send(wire.EndMachineAgent())
        else:
            self._link.close()

    def let_go(self) -> None:
        """No other agent is wanted of it; called in the thread of the links."""
        self._stays = False
        if self._is_idle.is_set():
            self._link.close()

    def _abort(self) -> None:
        in_background().call_soon_threadsafe(self._link.abort)

    def _how_it_ended(self) -> AgentEnd:
        lost = AgentEnd(
            f"on {self.name} was lost: the connection to that machine ended, or nothing was heard "
            "on it for some seconds",
            likely="the machine was switched off, its network is down, or its "
            "`notebook-accel join` was ended",
        )
        # It says how its agent ended just before the channel is closed.
        self._is_idle.wait(_END_SECONDS)
        return self._end or lost


class MachineServer:
    """Listens for the machines of a run, and admits as many as are wanted.

    Attributes:
        machines: those that are connected, in the order in which they joined.
        token: what they need beside the address.
        refused: why the last one was refused; "" where none was.
    """

    def __init__(self, host: str, port: int, wanted: int) -> None:
        """Listen.

        Args:
            host: the address to listen at; "" for all of this machine.
            port: 0 for any that is free.
            wanted: number of machines.

        Raises:
            LaunchError: the address cannot be listened at, or there is no certificate.
        """
        self.machines: list[JoinedMachine] = []
        self.refused = ""
        self._wanted = wanted
        context, fingerprint = server_context()
        self.token = Token.new(fingerprint)
        opening = asyncio.start_server(
            self._meet,
            host or "0.0.0.0",
            port,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
        )
        try:
            self._server = await_from_thread(_awaited(opening))
        except OSError as error:
            raise LaunchError(
                f"{host or 'this machine'}:{port} cannot be listened at for the other machines "
                f"({error.strerror or error}): master_addr= must be an address of this machine, "
                "and use_port= a free port, or be left out"
            ) from None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Listen no more, and let go of the machines, each once its agent has ended."""
        in_background().call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._server.close()
        for machine in self.machines:
            machine.let_go()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            proof = check_proof(reader, self.token)
            problem = await asyncio.wait_for(proof, HANDSHAKE_SECONDS)
        except (OSError, EOFError, asyncio.TimeoutError):
            writer.transport.abort()
            return
        link = MachineLink(reader, writer)
        if problem:
            self._refuse(link, problem)
        machine: JoinedMachine | None = None

        def take(message: wire.Message) -> None:
            nonlocal machine
            if machine is not None:
                machine.take(message)
            elif isinstance(message, wire.MachineJoined):
                why = self._why_not(message)
                if why:
                    self._refuse(link, why)
                else:
                    machine = JoinedMachine(link, message)
                    self.machines.append(machine)

        await link.serve(take)
        if machine is not None:
            self.machines.remove(machine)
            machine.close_answers()

    def _why_not(self, info: wire.MachineJoined) -> str:
        mine = platform.python_version_tuple()[:2]
        if tuple(info.python.split(".")[:2]) != mine:
            return (
                f"it has Python {info.python}, and the notebook {platform.python_version()}: "
                f"functions travel between equal versions alone; join with Python {'.'.join(mine)}"
            )
        if len(self.machines) >= self._wanted:
            return "all machines of the launch have joined: the token is used up"
        return ""

    def _refuse(self, link: MachineLink, why: str) -> None:
        self.refused = f"{link.peer_address} was refused: {why}"
        link.send(wire.MachineRefused(text=why))
        link.close()


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


# ---- The engine ----------------------------------------------------------------------------


class ElasticEngine(AgentEngine):
    """This machine, and those that join the launch. One engine serves one launch or session."""

    description = "engine='elastic', which finds its machines by `notebook-accel join`"
    unused = (
        "rdzv_backend",
        "rdzv_conf",
        "rdzv_id",
        "monitor_interval",
        "log_line_prefix_template",
    )

    def __init__(self) -> None:
        self._here = LocalEngine()
        self._server: MachineServer | None = None
        self._machines: list[JoinedMachine] = []

    def warm_up(self, request: StartRequest) -> None:
        self._here.warm_up(request)

    def plan_ranks(self, request: StartRequest) -> RankPlan:
        config = request.config
        wanted = config.num_nodes - 1
        if not wanted:
            return self._plan_on([], request)
        if self._server is None:
            self._server = MachineServer(config.master_addr or "", config.use_port or 0, wanted)
            weakref.finalize(self, self._server.close)
        return self._plan_on(self._gather(self._server, request, wanted), request)

    def _plan_on(self, machines: list[JoinedMachine], request: StartRequest) -> RankPlan:
        """The ranks of this machine and of these."""
        config, self._machines = request.config, machines
        here = self._here.plan_ranks(request)
        if not machines:
            return replace(here, environment={**here.environment, **_torchelastic(config)})
        sizes = [_num_ranks(machine.info, config, here) for machine in self._machines]
        address = config.master_addr or self._machines[0].own_address
        common = {
            **here.environment,
            "MASTER_ADDR": address,
            # use_port is where machines join.
            "MASTER_PORT": "0",
            **_torchelastic(config),
            **_interfaces(interface_of(address), request.environment),
        }
        plan = RankPlan.of_sizes(here.world_size, *sizes, environment=common)
        return replace(plan, notices=_notices(self._machines))

    def plan_again(self, request: StartRequest) -> RankPlan:
        """On the machines that are left, and those that have joined meanwhile."""
        if self._server is None:
            return self.plan_ranks(request)
        machines = [machine for machine in self._server.machines if machine.is_open]
        return self._plan_on(machines, request)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _gather(
        self, server: MachineServer, request: StartRequest, wanted: int
    ) -> list[JoinedMachine]:
        """Wait until the machines have joined; an interrupt ends the wait.

        Raises:
            LaunchError: they do not come.
        """
        host = request.config.master_addr or _outward_address()
        command = f"notebook-accel join {host}:{server.port} --token {server.token}"
        said = None
        deadline = time.monotonic() + _JOIN_SECONDS
        while len(machines := list(server.machines)) < wanted:
            state = wanted - len(machines), server.refused
            if state != said:
                said = state
                more = f"{state[0]} more machine{'s' * (state[0] > 1)}"
                refused = f"\n({server.refused})" if server.refused else ""
                request.view.waits_for_machines(
                    f"{request.name}: waits for {more}. Run there:\n    {command}{refused}"
                )
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"{len(machines) + 1} of {wanted + 1} machines were there after "
                    f"{_JOIN_SECONDS:g} s: launch again, and run on each other machine the command "
                    "that is shown"
                )
            time.sleep(_POLL_SECONDS)
        return machines

    def start_agents(self, request: StartRequest, plan: RankPlan, *, run: str) -> list[AgentLink]:
        first, *others = plan.agents
        links = self._here.start_agents(request, replace(plan, agents=(first,)), run=run)
        try:
            if others:
                threads = num_threads_of(request.environment, len(first))
                links = [replace(links[0], launch_fields={"num_threads": threads})]
            for machine, ranks in zip(self._machines, others, strict=True):
                fields = partial(_fields_of_launch, machine.info, request, plan, len(ranks))
                links.append(machine.start_agent(ranks, fields, run=run))
        except BaseException:
            for link in links:
                link.channel.close()
                link.end()
            raise
        if not request.config.max_restarts:
            self.close()
        return links


def _num_ranks(info: wire.MachineJoined, config: LaunchConfig, here: RankPlan) -> int:
    """How many ranks a machine gets.

    Raises:
        ConfigError: it cannot have as many, or has other devices than this one.
    """
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


def _torchelastic(config: LaunchConfig) -> dict[str, str]:
    """What functions written for torchrun read of restarts."""
    return {
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
    }


def _interfaces(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The interface of gloo and NCCL, unless the person has set one."""
    chosen = (variable for variable in INTERFACES if environment.get(variable) in (None, "lo"))
    return dict.fromkeys(chosen, name) if name else {}


def _fields_of_launch(
    info: wire.MachineJoined,
    request: StartRequest,
    plan: RankPlan,
    num_ranks: int,
    directory: str,
) -> dict[str, Any]:
    """What ranks of another machine have of it: its variables, and beside them what cells set."""
    of_machine = {**info.environment, **_set_by_cells()}
    of_plan = {name: text for name, text in plan.environment.items() if name not in INTERFACES}
    if request.config.devices == "cpu":
        of_plan |= WITHOUT_DEVICES
    elif not info.devices:
        of_plan |= ON_CPU
    num_threads = num_threads_of(of_machine, num_ranks, info.num_cores)
    of_engine = {
        **_interfaces(info.interface, of_machine),
        "OMP_NUM_THREADS": str(num_threads),
        **of_plan,
        **info.device_environment,
    }
    # The notebook's own folders first, as far as they are there; then what the machine has itself.
    installed = (sys.prefix, sys.base_prefix)
    mine = [entry for entry in import_path() if not entry.startswith(installed)]
    return {
        "environment": rank_environment(request.config, of_engine=of_engine, base=of_machine),
        "directory": directory,
        "path": tuple(dict.fromkeys([*mine, *info.path])),
        "num_threads": num_threads,
    }


def _set_by_cells() -> dict[str, str]:
    """The variables that this process has changed since it began."""
    began = Path("/proc/self/environ").read_bytes().split(b"\0")
    before = dict(os.fsdecode(entry).partition("=")[::2] for entry in began)
    return {name: text for name, text in kept_environment().items() if before.get(name) != text}


def _notices(machines: list[JoinedMachine]) -> tuple[str, ...]:
    """Lines for the person: who is there, and what may go wrong."""
    here = version("torch")
    other = [f"{m.info.host} has {m.info.torch}" for m in machines if m.info.torch != here]
    names = ", ".join(machine.name for machine in machines)
    lines = [f"other machines: {names}"]
    if other:
        lines.append(f"{', '.join(other)}, this machine torch {here}: take one version on all")
    return tuple(lines)


def interface_of(address: str) -> str:
    """The network interface of this machine that has the address; "" where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""


def _outward_address() -> str:
    """The address by which this machine would reach others; nothing is sent to find it."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with udp, contextlib.suppress(OSError):
        udp.connect(("192.0.2.1", 9))  # set aside for documentation
        return str(udp.getsockname()[0])
    return "127.0.0.1"


# ---- On the other machines -----------------------------------------------------------------


def join(address: str, token: str, *, tell: Callable[[str], None] | None = None) -> None:
    """Lend this machine to a run of a notebook, until the run has ended.

    An interrupt ends the ranks here, and so the run.

    Args:
        address: ``HOST:PORT``, as the notebook shows it.
        token: as the notebook shows it.
        tell: takes lines for the person; None writes them to ``sys.stderr``.

    Raises:
        ConfigError: the address or the token is none.
        LaunchError: nobody listens there, the token is not the launch's, or the notebook refuses
            this machine.
    """
    host, port = parse_address(address)
    given = Token.of_text(token)
    say = tell or (lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    environment = kept_environment()
    # Before the connection: nobody waits for imports then.
    found = ask_template(environment, lambda source: source.count_devices(environment))
    info = wire.MachineJoined(
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=version("torch"),
        environment=environment,
        directory=os.getcwd(),
        path=tuple(import_path()),
        num_cores=num_cores(),
        interface="",
        devices=found.names,
        device_environment=found.environment,
    )
    await_from_thread(_Guest(environment, say).serve(host, port, given, info))


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = text.strip().rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise ConfigError(f"{text!r}: expected HOST:PORT, as the notebook shows it")
    return host.strip("[]"), int(port)


class _Guest:
    """This machine while it is lent."""

    def __init__(self, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._environment = environment
        self._say = say
        self._requests: asyncio.Queue[wire.Message | None] = asyncio.Queue()
        self._agent: AgentLink | None = None

    async def serve(self, host: str, port: int, token: Token, info: wire.MachineJoined) -> None:
        """Do what the notebook asks for until the connection ends."""
        link = await self._connect(host, port, token)
        interface = interface_of(link.own_address)
        serving = asyncio.ensure_future(link.serve(self._requests.put_nowait))
        serving.add_done_callback(lambda _: self._requests.put_nowait(None))
        link.send(msgspec.structs.replace(info, interface=interface))
        self._say(f"joined {host}:{port}; waiting for the notebook")
        passing: asyncio.Task[None] | None = None
        try:
            while (message := await self._requests.get()) is not None:
                if isinstance(message, wire.MachineRefused):
                    raise LaunchError(f"the notebook refused this machine: {message.text}")
                if isinstance(message, wire.StartMachineAgent):
                    passing = await self._start(link, message)
                elif isinstance(message, wire.EndMachineAgent) and passing is not None:
                    link.detach()
                    await passing
        finally:
            link.abort()
            if self._agent is not None:
                await asyncio.to_thread(self._agent.end)
        self._say("the notebook has let go of this machine: the run has ended")

    async def _connect(self, host: str, port: int, token: Token) -> MachineLink:
        try:
            return await open_link(host, port, token)
        except (OSError, asyncio.TimeoutError) as error:
            raise LaunchError(
                f"no notebook waits at {host}:{port} ({error or 'no answer'}): is its launch "
                "waiting still, and does a firewall let this machine through?"
            ) from None

    async def _start(
        self, link: MachineLink, message: wire.StartMachineAgent
    ) -> asyncio.Task[None] | None:
        """Have an agent forked; the task ends once it has ended, and the notebook knows."""
        directory = message.directory if os.path.isdir(message.directory) else os.getcwd()
        fork = partial(
            fork_agent, self._environment, (), tcp_pair, run=message.run, sees_files=False
        )
        try:
            agent = self._agent = await asyncio.to_thread(fork)
        except LaunchError as error:
            link.send(wire.MachineAgentStarted(error=str(error)))
            return None
        sock = socket.socket(fileno=os.dup(agent.channel.fileno()))
        agent.channel.close()
        passing = await link.attach(sock)
        link.send(wire.MachineAgentStarted(directory=directory))
        self._say("an agent has started: the ranks here train")
        return asyncio.ensure_future(self._report_end(link, agent, passing))

    async def _report_end(
        self, link: MachineLink, agent: AgentLink, passing: asyncio.Task[None]
    ) -> None:
        await passing
        end = await asyncio.to_thread(agent.how_it_ended)
        await asyncio.to_thread(agent.end)
        assert end is not None
        link.send(wire.MachineAgentEnded(how=end.how, traceback=end.traceback))
