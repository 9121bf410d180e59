"""The notebook's side of a run with other machines: admit the machines, start their agents.

    MachineServer: address, token  <----- join (elastic.py) ----  a template, ready to fork
    JoinedMachine.start_agent     ----- StartMachineAgent ----->  template -> agent
    AgentLink's channel <====== machine_link.py ======>           channel of the agent

An agent is the helper process that starts and watches the ranks of one machine, forked from the
machine's template process. The engines with several machines (elastic.py, ray.py) differ in how the
machines learn the address and the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import psutil

from notebook_accel import wire
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import LaunchError
from notebook_accel.launch.control.pool import AgentEnd, AgentLink
from notebook_accel.launch.engines import RankPlan
from notebook_accel.launch.engines.local import AgentEngine, abandon, may_have_libraries
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.rank_environment import (
    INTERFACES,
    ON_CPU,
    WITHOUT_DEVICES,
    num_threads_of,
    rank_environment,
)
from notebook_accel.launch.template.handle import followed
from notebook_accel.launch.text.terminal_text import escaped, one_line
from notebook_accel.launch.transport import machine_link
from notebook_accel.launch.transport.frames import FramedChannel
from notebook_accel.system.modules import import_path
from notebook_accel.system.processes import kept_environment

# The machine has its template before it joins, and forks an agent in milliseconds.
_AGENT_SECONDS = 60.0
# How an agent ended is known once its template has reaped it.
_END_SECONDS = 5.0
_TELL_SECONDS = 1.0
_PAUSE_SECONDS = 0.1
_MAX_NAME = 60
# Connections that have not proved the secret: strangers must not use up this process's files.
_MAX_UNPROVED = 64


# ---- In the notebook: a machine that has joined --------------------------------------------


class JoinedMachine:
    """Another machine that has joined the run and is connected; it runs one agent at a time.

    Its methods may be called from any thread except the connections' thread (which runs the event
    loop of ``machine_link.py``); those that are called in that thread say so.
    """

    def __init__(self, link: machine_link.MachineLink, info: wire.MachineJoined) -> None:
        self.info, self.link = info, link
        self.name = f"{_plain(info.host)} ({link.peer_address})"
        self.who = f"{_plain(info.user)}@{self.name}"
        self._answers: asyncio.Queue[wire.MachineAgentStarted | None] = asyncio.Queue()
        self._end: AgentEnd | None = None
        self._passing: asyncio.Task[None] | None = None
        # Set while the machine has no agent, and no channel of an agent is open.
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._outcome = ""

    def take(self, message: wire.Message) -> None:
        """Handle a message of the machine about its agent; called in the connections' thread."""
        if isinstance(message, wire.MachineAgentStarted):
            self._answers.put_nowait(message)
        elif isinstance(message, wire.MachineAgentEnded):
            how = f"on {self.name} {message.how}"
            self._end = AgentEnd(how, message.traceback)
            self.link.detach()
            self._note_end()

    def close_answers(self) -> None:
        """Wake all threads and tasks that wait for this machine, after its connection has ended.

        Called in the connections' thread.
        """
        self._answers.put_nowait(None)
        self._is_idle.set()

    def start_agent(
        self,
        ranks: tuple[int, ...],
        fields: Mapping[str, Any],
        imports: tuple[wire.ImportItem, ...],
        *,
        run: str,
    ) -> AgentLink:
        if not self._is_idle.wait(_END_SECONDS):
            raise LaunchError(f"the last agent on {self.name} has not ended. Launch again")
        ours, theirs = socket.socketpair()
        try:
            request = wire.StartMachineAgent(
                run=run,
                directory=os.getcwd(),
                environment=fields["environment"],
                path=fields["path"],
                imports=imports,
            )
            answer = machine_link.await_from_thread(self._start(theirs, request), _AGENT_SECONDS)
        except TimeoutError:
            answer = wire.MachineAgentStarted(error=f"no answer in {_AGENT_SECONDS:g} s")
        if answer is None or answer.error:
            ours.close()
            why = "its connection ended" if answer is None else answer.error
            raise LaunchError(f"{self.name} started no agent: {why}. Launch again")
        return AgentLink(
            channel=FramedChannel(ours),
            ranks=ranks,
            how_it_ended=self._how_it_ended,
            kill=self._kill_agent,
            launch_fields={**fields, "directory": answer.directory},
        )

    async def _start(
        self, theirs: socket.socket, request: wire.StartMachineAgent
    ) -> wire.MachineAgentStarted | None:
        self._end = None
        self._is_idle.clear()
        self._passing = await self.link.attach(theirs)
        self._passing.add_done_callback(self._end_agent)
        self.link.send(request)
        return await self._answers.get()

    def _end_agent(self, _: asyncio.Task[None]) -> None:
        if self._end is not None:
            self._note_end()
        else:
            self.link.send(wire.EndMachineAgent())

    def _note_end(self) -> None:
        """Free the machine for another agent, if the channel of the agent that ended has closed.

        If the channel is still open, this is called again when it closes. A freed machine that was
        let go (:meth:`let_go`) is disconnected.
        """
        if self._passing is not None and self._passing.done():
            self._is_idle.set()
            if self._outcome:
                self._disconnect()

    def let_go(self, outcome: str) -> None:
        """Disconnect the machine now or, if it has an agent, once the agent has ended.

        Called in the connections' thread.
        """
        self._outcome = self._outcome or outcome
        if self._is_idle.is_set():
            self._disconnect()
        elif outcome != "ended":
            # This process may end before the agent has.
            self.link.send(wire.MachineReleased(outcome=outcome))

    def _disconnect(self) -> None:
        self.link.send(wire.MachineReleased(outcome=self._outcome))
        self.link.close()

    def _kill_agent(self) -> None:
        # The connection is all that reaches it. It is kept where the agent has ended by itself.
        if self._end is None:
            machine_link.in_background().call_soon_threadsafe(self.link.abort)

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
    """Server in the notebook's kernel that admits the other machines of a run.

    Attributes:
        refused: which machine was refused last and why, for the user; "" if none was.
    """

    def __init__(self, host: str, port: int, wanted: int) -> None:
        """Start listening for machines.

        Args:
            host: IP address or name to listen at; "" for all addresses of this machine.
            port: port to listen at; 0 for any free one.
        """
        self.machines: list[JoinedMachine] = []
        self.refused = ""
        self._wanted = wanted
        self._num_unproved = 0
        self._context, fingerprint = machine_link.server_context()
        self.token = machine_link.Token.new(fingerprint)
        try:
            at = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(at[4][:2], family=at[0])
        except OSError as error:
            raise LaunchError(
                f"{host or 'this machine'}:{port} cannot be listened at for the other machines "
                f"({error.strerror or error}): master_addr= must be an address of this machine, "
                "and use_port= a free port, or be left out"
            ) from None
        listener.setblocking(False)
        self.port: int = listener.getsockname()[1]
        self._meetings: set[asyncio.Task[None]] = set()
        self.listening = asyncio.run_coroutine_threadsafe(
            self._listen(listener), machine_link.in_background()
        )

    def close(self, outcome: str) -> None:
        """Stop listening, and disconnect each machine once its agent has ended; returns at once."""
        asyncio.run_coroutine_threadsafe(self.tell(outcome), machine_link.in_background())

    async def tell(self, outcome: str) -> None:
        """Do the same in the connections' thread; what the machines are told has been sent then."""
        self.listening.cancel()
        for machine in self.machines:
            machine.let_go(outcome)

    async def _listen(self, listener: socket.socket) -> None:
        # By hand: asyncio's server holds any number of connections that begin no TLS.
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError:  # no more files can be opened, say
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                if self._num_unproved >= _MAX_UNPROVED:
                    sock.close()
                    continue
                self._num_unproved += 1
                meeting = loop.create_task(self._meet(sock))
                self._meetings.add(meeting)
                meeting.add_done_callback(self._meetings.discard)

    async def _meet(self, sock: socket.socket) -> None:
        proving = self._await_proof(sock)
        try:
            reader, writer, problem = await asyncio.wait_for(
                proving, machine_link.HANDSHAKE_SECONDS
            )
        except (OSError, EOFError, asyncio.TimeoutError):
            return
        finally:
            self._num_unproved -= 1
        link = machine_link.MachineLink(reader, writer)
        if problem:
            self._refuse(link, problem)
            return
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

    async def _await_proof(
        self, sock: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """Return the connection once the secret was proved, and why it is refused, or ""."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=self._context,
            ssl_handshake_timeout=machine_link.HANDSHAKE_SECONDS,
        )
        try:
            problem = await machine_link.check_proof(reader, self.token)
        except BaseException:
            transport.abort()
            raise
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop), problem

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

    def _refuse(self, link: machine_link.MachineLink, why: str) -> None:
        self.refused = f"{link.peer_address} was refused: {why}"
        link.send(wire.MachineRefused(text=why))
        link.close()


def _plain(name: str) -> str:
    return one_line(escaped(name), _MAX_NAME)


class MachinesEngine(AgentEngine):
    """Base class of engines with ranks on other machines, which join the run over the network."""

    def __init__(self) -> None:
        self._server: MachineServer | None = None
        self._machines: list[JoinedMachine] = []

    def _listen(self, host: str, port: int, wanted: int) -> MachineServer:
        server = self._server = MachineServer(host, port, wanted)
        weakref.finalize(self, server.close, "ended")
        return server

    @abstractmethod
    def _plan_on(self, machines: list[JoinedMachine], request: LaunchRequest) -> RankPlan:
        """Return the plan of ranks on these machines, which become the machines of the run."""

    def plan_again(self, request: LaunchRequest) -> RankPlan:
        """Return the plan of the ranks of a restart, on the machines that are still connected."""
        joined = [] if self._server is None else self._server.machines
        return self._plan_on([machine for machine in joined if machine.link.is_open], request)

    def close(self, outcome: str = "failed") -> None:
        if self._server is not None:
            # Whatever happens to connections, the run must end.
            with contextlib.suppress(Exception):
                machine_link.await_from_thread(self._server.tell(outcome), _TELL_SECONDS)

    def start_here(self, request: LaunchRequest, plan: RankPlan, *, run: str) -> list[AgentLink]:
        """Start the agents on the notebook's machine, and return the connections to them.

        These agents are the first ones of the plan. The default starts none and returns [], for an
        engine that has no ranks on this machine.
        """
        return []

    def start_agents(self, request: LaunchRequest, plan: RankPlan, *, run: str) -> list[AgentLink]:
        links = self.start_here(request, plan, run=run)
        imports = followed() if may_have_libraries(request) else ()
        try:
            for machine, ranks in zip(self._machines, plan.agents[len(links) :], strict=True):
                fields = _fields_of_launch(machine.info, request, plan, len(ranks))
                links.append(machine.start_agent(ranks, fields, imports, run=run))
        except BaseException:
            abandon(links)
            self.close()
            raise
        if self._server is not None:
            # The token admits no machine any more, not even in place of a lost one.
            self._server.listening.cancel()
        return links


# ---- What ranks of another machine get ------------------------------------------------------


def torchelastic_variables(config: LaunchConfig) -> dict[str, str]:
    """Return the variables from which a function learns about restarts, as with torchrun."""
    return {
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
    }


def interface_variables(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use a network interface.

    Args:
        name: name of the interface; for "" the result is {}.
    """
    chosen = (variable for variable in INTERFACES if environment.get(variable) in (None, "lo"))
    return dict.fromkeys(chosen, name) if name else {}


def _fields_of_launch(
    info: wire.MachineJoined, request: LaunchRequest, plan: RankPlan, num_ranks: int
) -> dict[str, Any]:
    """Return the fields of ``wire.Launch`` that differ on another machine, but its directory."""
    # Cells may have set variables here for the ranks, so ranks on other machines get them, too.
    before = psutil.Process().environ()
    kept = kept_environment().items()
    of_cells = {name: text for name, text in kept if before.get(name) != text}
    of_machine = {**info.environment, **of_cells}
    of_plan = {name: text for name, text in plan.environment.items() if name not in INTERFACES}
    if request.config.devices == "cpu":
        of_plan |= WITHOUT_DEVICES
    elif not info.devices:
        of_plan |= ON_CPU
    num_threads = num_threads_of(of_machine, num_ranks, info.num_cores)
    of_engine = {
        **interface_variables(info.interface, of_machine),
        "OMP_NUM_THREADS": str(num_threads),
        **of_plan,
    }
    # The notebook's own folders first, as far as they are there; then what the machine has itself.
    # In place of this environment each machine has its own; a folder of the person's packages
    # (pip install --user) may be there as well.
    installed = (sys.prefix, sys.base_prefix)
    mine = [entry for entry in import_path() if not entry.startswith(installed)]
    return {
        "environment": rank_environment(request.config, of_engine=of_engine, base=of_machine),
        "path": tuple(dict.fromkeys([*mine, *info.path])),
        "num_threads": num_threads,
        "log_dir": None,
    }


def notices_of(machines: Sequence[JoinedMachine]) -> tuple[str, ...]:
    """Return messages for the user: which machines joined, and which have another torch version."""
    here = version("torch")
    other = [f"{m.info.host} has {m.info.torch}" for m in machines if m.info.torch != here]
    names = ", ".join(machine.who for machine in machines)
    lines = [f"other machines: {names}"]
    if other:
        lines.append(f"{', '.join(other)}, this machine torch {here}: take one version on all")
    return tuple(lines)


def interface_of(address: str) -> str:
    """Return the name of this machine's network interface with an IP address; "" if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, first the one from which it sends to the network.

    Only the system's tables are asked: nothing is sent. Without a network it is 127.0.0.1 alone.
    """
    first = []
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with udp, contextlib.suppress(OSError):
        udp.connect(("192.0.2.1", 9))  # set aside for documentation
        first = [str(udp.getsockname()[0])]
    found = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    return list(dict.fromkeys([*first, *found])) or ["127.0.0.1"]
