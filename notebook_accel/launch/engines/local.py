"""The base class of engines whose ranks are started by agents, and the local engine.

An agent is the helper process that starts and watches the ranks of one machine. It is forked from
the template, a clean process that has torch imported; the agent itself then forks the ranks::

    AgentEngine.begin
        start_ranks: start_agents -> an AgentLink per agent -> RankPool, which sends wire.Launch
        RankCall.sent: sends wire.BeginCall
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from notebook_accel import tpu, wire
from notebook_accel.config import shares_devices
from notebook_accel.config.checks import check_enough
from notebook_accel.errors import ConfigError
from notebook_accel.launch.control.call import Call, NewCall, RankCall
from notebook_accel.launch.control.pool import AgentEnd, AgentLink, RankPool
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.control.run_state import ProcessState
from notebook_accel.launch.engines import Engine, RankPlan
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.payload import PackedCall
from notebook_accel.launch.rank_environment import (
    ON_CPU,
    WITHOUT_DEVICES,
    num_threads_of,
    rank_environment,
    variables_of_choice,
)
from notebook_accel.launch.template.handle import Template, ask_template
from notebook_accel.launch.template.process import traceback_of
from notebook_accel.launch.transport.channel import Channel
from notebook_accel.launch.view import View
from notebook_accel.system import processes
from notebook_accel.system.interrupts import held
from notebook_accel.system.modules import import_path

# The template reaps an agent at once, but on a machine with ten times as many processes as cores it
# may get its turn a second later.
_EXIT_SECONDS = 3.0
# SIGKILL takes milliseconds, and longer on a machine with more work than processors.
_KILLED_SECONDS = 1.0
# Between two looks at how far the imports are.
_POLL_SECONDS = 0.005
# Beginnings of variables that no library reads at its import: with others in ``env=``, ranks import
# all libraries themselves.
_READ_LATER = ("ACCELERATE_", "CUDA_", "GLOO_", "MASTER_", "NCCL_", "NOTEBOOK_ACCEL_", "OMP_")
_ASK_FOR_MORE = (
    "no accelerator is visible: 1 rank on the CPU; num_processes=2 would train on two ranks "
    "(%%accelerate -n 2 in a cell)"
)

# Why there is no prepared template, which is said once.
_said: set[str] = set()


# What ranks on a kind of devices need, as somebody has to decide before they begin.
_VARIABLES: dict[str, Callable[[Mapping[str, str], int], dict[str, str]]] = {
    "tpu": tpu.launch_variables
}


class AgentEngine(Engine):
    """Base class of engines whose ranks are started by agents."""

    start_method: ClassVar[str] = "fork"
    """How its agents bring rank processes about (``wire.Launch``)."""

    @contextmanager
    def begin(self, plan: RankPlan, packed: PackedCall | None, new: NewCall) -> Iterator[Call]:
        assert packed is not None, "starts_ranks"
        request, folder = new.request, new.folder
        of_ranks = request.without_function()

        def start_again(attempt: int) -> RankPool:
            plan = self.plan_again(of_ranks)
            variables = {**plan.environment, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
            plan = replace(plan, environment=variables)
            return self.start_ranks(of_ranks, plan, folder)

        with held():
            pool = (
                WaitingPool(self, of_ranks, folder, plan.world_size)
                if plan.is_awaited
                else self.start_ranks(request, plan, folder)
            )
            again = start_again if request.config.max_restarts else None
            call = RankCall(pool, packed, new, start_again=again, close=self.close)
            with call.sent(last=True):
                yield call

    def start_ranks(self, request: LaunchRequest, plan: RankPlan, folder: RunFolder) -> RankPool:
        with held():
            links = self.start_agents(request, plan, run=folder.id)
            try:
                pool = RankPool(
                    links, run=folder.id, grace=request.config.grace, log_dir=folder.path
                )
                for link in links:
                    num_threads = num_threads_of(request.environment, len(link.ranks))
                    of_engine = {"OMP_NUM_THREADS": str(num_threads), **plan.environment}
                    # An agent of another machine has other ones of some of these.
                    fields = {
                        "environment": rank_environment(request.config, of_engine=of_engine),
                        "directory": os.getcwd(),
                        "path": tuple(import_path()),
                        "log_dir": str(folder.path),
                        "num_threads": num_threads,
                        **link.launch_fields,
                    }
                    message = wire.Launch(
                        run=folder.id,
                        world_size=plan.world_size,
                        ranks=link.ranks,
                        start_method=self.start_method,
                        **fields,
                    )
                    pool.send(message, to=[link])
            except BaseException:
                abandon(links)
                raise
            return pool

    @abstractmethod
    def start_agents(self, request: LaunchRequest, plan: RankPlan, *, run: str) -> list[AgentLink]:
        """Start the agents of the plan, and return a connection to each, in the plan's order."""

    def plan_again(self, request: LaunchRequest) -> RankPlan:
        """Return the plan of the ranks with which a failed run is restarted (``max_restarts``)."""
        return self.plan_ranks(request)


class WaitingPool(RankPool):
    """In place of ranks that cannot start yet, since machines or room in a cluster are awaited.

    RankCall --is sent to--> WaitingPool, whose thread has the engine wait
    machines are there: the call is sent to their RankPool, as after a restart
    stopped, or they do not come: the call ends
    """

    is_awaited = True

    def __init__(
        self, engine: AgentEngine, request: LaunchRequest, folder: RunFolder, world_size: int
    ) -> None:
        self.run, self.grace = folder.id, request.config.grace
        self.processes = tuple(ProcessState(rank=rank) for rank in range(world_size))
        self._links = []
        self._turn = threading.Lock()
        self._engine, self._request, self._folder = engine, request, folder
        self._is_stopped = False
        self._thread = threading.Thread(target=self._await, name=f"waits-{self.run}", daemon=True)

    def check_free(self) -> None:
        return

    def send_call(self, call: Any, *_: object) -> None:
        self._late_call: RankCall = call
        call.begin(1)

    def _poll(self) -> None:
        self._late_call.tick()
        if self._is_stopped:
            raise CancelledError

    def _await(self) -> None:
        with self._turn:  # until the run is listed and shown
            call = self._late_call
        try:
            request = replace(self._request, view=_NoticesOfWait(call), poll=self._poll)
            plan = self._engine.plan_ranks(request)
            call.show_notices(*plan.notices)
            call.move_to(self._engine.start_ranks(self._request, plan, self._folder))
        except CancelledError:
            call.end_unstarted("")
        except Exception as error:  # in the only thread that can end the call
            call.end_unstarted(str(error) or type(error).__name__)

    def kill(self, *_: Any, **_asked: Any) -> None:
        self._is_stopped = True

    ask_end = kill

    def stacks(self, rank: int | None = None) -> list[tuple[int, str]]:
        return []


class _NoticesOfWait(View):
    """Shows what a run waits for among the notices of the run, which has been opened already."""

    def __init__(self, call: RankCall) -> None:
        self._call = call

    def waits_for_machines(self, text: str) -> None:
        self._call.show_wait(text)


def abandon(links: Iterable[AgentLink]) -> None:
    """Close the connections to agents and kill them, after a start that failed half-way."""
    for link in links:
        link.channel.close()
        link.end()


class LocalEngine(AgentEngine):
    """Engine with ranks on this machine, the default (``engine="local"``).

    Without ``num_processes`` it starts one rank for each accelerator or, if there is none, one rank
    on the CPU. Ranks are forks of a clean process, not of the kernel, so it is harmless if the
    kernel has used CUDA or threads.
    """

    description = "engine='local', whose ranks are on one machine"
    can_detach = True
    # Why there is no prepared template.
    _problem = ""

    def warm_up(self, request: LaunchRequest) -> None:
        def wait(source: Template) -> None:
            if not source.is_ready:
                request.view.launch_is_slow(request.name)
            source.wait_until_ready()
            if not may_have_libraries(request):
                return
            show = partial(request.view.launch_is_slow, request.name)
            self._problem = await_imports(source, show).problem

        ask_template(request.environment, wait)

    def plan_ranks(self, request: LaunchRequest) -> RankPlan:
        plan = self._plan_ranks(request)
        if not self._problem or _said:
            return plan
        _said.add(self._problem)
        notice = f"each rank imports the notebook's libraries itself: {self._problem}"
        return replace(plan, notices=(*plan.notices, notice))

    def _plan_ranks(self, request: LaunchRequest) -> RankPlan:
        wanted = request.config.num_processes
        if request.config.devices == "cpu":
            return RankPlan.of_sizes(wanted or 1, environment=WITHOUT_DEVICES)
        environment = request.environment
        found = ask_template(environment, lambda source: source.count_devices(environment))
        available, chosen = len(found.names), request.config.devices
        choice = variables_of_choice(chosen, found.kind)
        if isinstance(chosen, tuple):
            if choice:  # all were counted, without it
                available = sum(index < available for index in chosen)
            _check_chosen(chosen, available, found.kind)
        if not available:
            problem = (f"torch can use no accelerator: {found.problem}",) if found.problem else ()
            notices = (*problem, *(() if wanted else (_ASK_FOR_MORE,)))
            return RankPlan.of_sizes(wanted or 1, environment=ON_CPU, notices=notices)
        if wanted is not None and not shares_devices(request.config):
            check_enough(wanted, available, f"this machine has {available}")
        # What the person has set stays.
        number = wanted or available
        ask = _VARIABLES.get(found.kind)
        needed = {} if ask is None else ask(environment, number)
        needed = {name: text for name, text in needed.items() if name not in environment}
        usable = chosen if isinstance(chosen, tuple) else range(available)
        plan = RankPlan.of_sizes(number, environment={**needed, **choice})
        return replace(plan, devices=tuple(usable[:number]))

    def start_agents(self, request: LaunchRequest, plan: RankPlan, *, run: str) -> list[AgentLink]:
        (ranks,) = plan.agents
        is_prepared = may_have_libraries(request)
        return [fork_agent(request.environment, ranks, run=run, is_prepared=is_prepared)]


def await_imports(
    source: Template, show: Callable[[str], object] = str, *, seconds: float = float("inf")
) -> wire.Imports:
    """Wait until a template has imported what it was told; ranks would import it each for itself.

    Args:
        seconds: how long to wait, at most.
    """
    shown, deadline = "", time.monotonic() + seconds
    while (state := source.imports()).importing and time.monotonic() < deadline:
        if state.importing != shown:
            shown = state.importing
            show(shown)
        time.sleep(_POLL_SECONDS)
    return state


def may_have_libraries(request: LaunchRequest) -> bool:
    """Whether ranks may have what was imported before: not for other variables or a debugger."""
    own = request.config.env or {}
    return not request.config.debug and all(name.startswith(_READ_LATER) for name in own)


def fork_agent(
    environment: Mapping[str, str], ranks: tuple[int, ...], *, run: str, **how: bool
) -> AgentLink:
    """Have the template process fork an agent, and return the connection to the agent."""

    def fork(source: Template) -> AgentLink:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = source.fork_agent(theirs, run=run, **how)
        except BaseException:
            # An agent that was forked all the same ends when its channel does.
            ours.close()
            raise
        return AgentLink(
            channel=Channel(ours),
            ranks=ranks,
            how_it_ended=partial(_how_it_ended, source, pid),
            kill=partial(_end, source, pid, run),
        )

    return ask_template(environment, fork)


def _end(source: Template, pid: int, run: str) -> None:
    """Kill an agent and all processes that it started, and remove its temporary files."""
    # Of one that has ended, the number may be that of another process by now.
    if source.exit_of(pid, timeout=0.0) is None:
        processes.kill_tree([pid])
        # Only once it is dead can its session be told from that of a later process of its number.
        processes.await_exit(pid, _KILLED_SECONDS)
    killed = processes.kill_leftovers(session=pid, variable=("NOTEBOOK_ACCEL_RUN", run))
    processes.remove_scratch(run, pid, used_by=killed)


def _check_chosen(devices: tuple[int, ...], available: int, kind: str) -> None:
    if len(devices) < available:
        raise ConfigError(
            f"devices={list(devices)}: accelerators of type {kind!r} do not read "
            "CUDA_VISIBLE_DEVICES. Leave devices= out, and set the variable that they do read "
            "before the launch: env={...} or os.environ"
        )
    if len(devices) > available:
        raise ConfigError(
            f"devices={list(devices)}, but of these the machine has {available or 'none'}: choose "
            "others, or devices='cpu', or leave it out for all that are visible"
        )


def _how_it_ended(source: Template, pid: int) -> AgentEnd:
    exited = source.exit_of(pid, timeout=_EXIT_SECONDS)
    if exited is None:
        return AgentEnd(f"(pid {pid}) is gone")
    # With 1 ends an agent that an exception has ended, which it wrote before.
    text = traceback_of(pid, source.error_output) if exited.exitcode == 1 else ""
    return AgentEnd(f"(pid {pid}) {processes.describe_exit(exited.exitcode)}", text)
