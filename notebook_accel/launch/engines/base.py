"""What an engine must do: say which ranks a launch gets, and bring them about.

    plan_ranks: LaunchRequest ---> RankPlan: the ranks of each agent
    start_agents: RankPlan ------> AgentLinks, each of which waits for wire.Launch
    start_ranks: AgentLinks -----> RankPool, to which calls are sent (control/pool.py)
    launch: LaunchRequest -------> a run that goes on: start ranks, send them one call, end them

An engine with agents writes the first two; nothing else about ranks differs between engines.

One launch passes through three records, from the person's side to the agents':

    LaunchRequest      what ranks are asked for, and the function that they are to call
    payload.PackedCall the function and its arguments, pickled
    NewRun             what the launcher made for the call: handle, folder, first state

Of a LaunchRequest and a RankPlan comes the message ``wire.Launch``, which starts rank processes; of
a PackedCall the message ``wire.Call``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec

from notebook_accel.errors import ConfigError
from notebook_accel.launch import run_list, wire
from notebook_accel.launch.control.environment import num_threads_of, rank_environment
from notebook_accel.launch.control.pool import RankPool
from notebook_accel.launch.control.results import Results
from notebook_accel.launch.control.stored_results import StoredResults
from notebook_accel.launch.control.supervisor import Supervisor
from notebook_accel.launch.payload import Packed
from notebook_accel.launch.payload.notebook_state import capture
from notebook_accel.launch.system.interrupts import held
from notebook_accel.launch.system.processes import import_path
from notebook_accel.launch.transport.segment import pack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.control.agent_link import AgentLink
    from notebook_accel.launch.control.conductor import Conductor
    from notebook_accel.launch.control.metrics_file import MetricStore
    from notebook_accel.launch.control.run_folder import RunFolder
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.payload import PackedCall
    from notebook_accel.launch.request import LaunchRequest
    from notebook_accel.launch.run import Run

__all__ = [
    "AgentEngine",
    "Engine",
    "NewRun",
    "RankPlan",
    "abandon",
    "begin_call",
    "closing_advice",
    "sendable",
]


# ---- Advice at the end of a run whose function seems to have forgotten something, and raised
# nothing.


def closing_advice(last: RunState, packed: PackedCall) -> list[str]:
    """What the function seems to have forgotten, one line for each; often none.

    Args:
        last: the state of the run at its end.
        packed: what was called.
    """
    lines = _lost_models(last, packed)
    has_group = any(rank.made_group for rank in last.ranks)
    has_succeeded = all(rank.returned for rank in last.ranks)
    # A function without torch trains nothing: copies that run on their own are what it wants.
    if packed.uses_torch and last.world_size > 1 and has_succeeded and not has_group:
        lines.append(
            f"no rank made a process group: {last.world_size} copies of {last.name} ran on their "
            "own (make an Accelerator in it, or call torch.distributed.init_process_group)"
        )
    return lines


def _lost_models(last: RunState, packed: PackedCall) -> list[str]:
    """A line if ranks used models of the notebook and none of them returned anything."""
    has_nothing = all(rank.returned and rank.returned_none for rank in last.ranks)
    if not packed.models or not has_nothing:
        return []
    names = ", ".join(f"`{name}`" for name in packed.models)
    line = (
        f"{last.name} used {names} of the notebook and returned None: the notebook's own stays as "
        "it was; return what you want to keep"
    )
    return [line]


# Arguments of Accelerate's notebook_launcher that only a launch over several machines reads. Here
# they are accepted, and a line says that they are not used (`Engine.unused`).
_OF_SEVERAL_MACHINES = (
    "master_addr",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_conf",
    "rdzv_id",
    "monitor_interval",
    "log_line_prefix_template",
)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Which ranks a launch gets.

    Attributes:
        agents: the ranks of each agent, numbered over all agents; the first one has rank 0.
        environment: variables that the engine gives every rank (``ON_CPU`` of
            control/environment.py, for example).
        notices: lines for the person.
    """

    agents: tuple[tuple[wire.RankSpec, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @classmethod
    def of_sizes(
        cls,
        *sizes: int,
        environment: Mapping[str, str] | None = None,
        notices: tuple[str, ...] = (),
    ) -> RankPlan:
        """A plan with one agent for each size, whose ranks differ in their numbers alone."""
        firsts = itertools.accumulate(sizes, initial=0)
        agents = (
            tuple(wire.RankSpec(rank=first + local, local_rank=local) for local in range(size))
            for first, size in zip(firsts, sizes, strict=False)
        )
        return cls(agents=tuple(agents), environment=environment or {}, notices=notices)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.agents))


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """What the launcher makes for a call before it is sent; it is a run from :meth:`begin` on.

    Attributes:
        run: the handle.
        state: before anything of the call exists.
        folder: of its logs and metrics.
        metrics: where they are written.
    """

    run: Run
    state: RunState
    folder: RunFolder
    metrics: MetricStore

    def begin(self, conductor: Conductor) -> None:
        """Give the handle its conductor, and list the run; called once, by the engine."""
        self.run._attach(conductor)
        self.folder.save(conductor.state, self.run.config)
        run_list.add(self.run)


class Engine(ABC):
    """A way to bring ranks about.

    Attributes:
        description: names the engine in a line for the person.
        unused: arguments of ``notebook_launcher`` for which it has no use.
        max_ranks: how many ranks it can have; None: any number.
        needs_payload: whether a call travels to its ranks, and so must be pickled.
        keeps_ranks: whether its ranks can stay for more calls, as those of a session do.
        can_detach: whether its runs can outlive the kernel.
    """

    description: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = _OF_SEVERAL_MACHINES
    max_ranks: ClassVar[int | None] = None
    needs_payload: ClassVar[bool] = True
    keeps_ranks: ClassVar[bool] = False
    can_detach: ClassVar[bool] = False

    def warm_up(self, request: LaunchRequest) -> None:
        """Do what takes long and may be interrupted, before anything of the run exists.

        Raises:
            LaunchError: what starts the ranks cannot be started itself.
        """
        return

    def check_here(self, config: LaunchConfig, environment: Mapping[str, str]) -> None:
        """Refuse what this machine cannot do, as far as that is known without starting anything.

        Args:
            config: of the launch.
            environment: of its ranks.

        Raises:
            ConfigError: the settings do not fit this machine.
            LaunchError: something that the engine needs is missing here.
        """
        return

    @abstractmethod
    def plan_ranks(self, request: LaunchRequest) -> RankPlan:
        """How many ranks the launch gets, behind which agents, and the variables that they get.

        Raises:
            ConfigError: more are asked for than there can be.
        """

    def num_ranks_here(self, request: LaunchRequest) -> int:
        """How many ranks the launch gets on this machine, found out without any other.

        Raises:
            ConfigError: more are asked for than there can be.
        """
        return self.plan_ranks(request).world_size

    @abstractmethod
    def launch(
        self, request: LaunchRequest, new: NewRun, plan: RankPlan, packed: PackedCall | None
    ) -> None:
        """Start ranks for this one call and send it to them; the run has begun then.

        Args:
            request: what is called.
            new: the run of the call.
            plan: which ranks there are to be.
            packed: what is called, pickled; None where the engine has no use for that.

        Raises:
            LaunchError: they could not be started; nothing is left of them.
        """

    def start_ranks(
        self, request: LaunchRequest, plan: RankPlan, *, run: str, log_dir: Path
    ) -> RankPool:
        """Start ranks that stay between calls; gives the pool of them, not yet listened to.

        Args:
            request: what they are asked for.
            plan: which ranks there are to be.
            run: id of the run or session.
            log_dir: folder of the files with the ranks' output.

        Raises:
            ConfigError: this engine has none that could stay.
            LaunchError: they could not be started; nothing is left of them.
        """
        raise ConfigError(
            f"a session needs ranks that stay between calls, and {self.description} has none: "
            "choose another engine"
        )


class AgentEngine(Engine):
    """An engine whose ranks are held by one or more agents."""

    keeps_ranks = True
    start_method: ClassVar[str] = "fork"
    """How its agents bring rank processes about, by the table of agent/agent.py."""

    @abstractmethod
    def start_agents(self, request: LaunchRequest, plan: RankPlan, *, run: str) -> list[AgentLink]:
        """One agent for each of the plan, in its order, each of which waits for ``wire.Launch``.

        Raises:
            LaunchError: one could not be started; nothing is left of the others.
        """

    def start_ranks(
        self, request: LaunchRequest, plan: RankPlan, *, run: str, log_dir: Path
    ) -> RankPool:
        message = _launch_message(request, plan, run=run, start_method=self.start_method)
        with held():
            links = self.start_agents(request, plan, run=run)
            try:
                pool = RankPool(links, run=run, grace=request.config.grace, log_dir=log_dir)
                for link in links:
                    folder = str(log_dir) if link.sees_files else None
                    own = {"ranks": link.ranks, "log_dir": folder, **link.launch_fields}
                    pool.send_launch(link, msgspec.structs.replace(message, **own))
            except BaseException:
                abandon(links)
                raise
            return pool

    def plan_again(self, request: LaunchRequest) -> RankPlan:
        """Which ranks there are after a failure, and behind which agents.

        Raises:
            ConfigError, LaunchError: there can be none.
        """
        return self.plan_ranks(request)

    def close(self) -> None:
        """No more ranks are to be started."""

    def launch(
        self, request: LaunchRequest, new: NewRun, plan: RankPlan, packed: PackedCall | None
    ) -> None:
        assert packed is not None, "needs_payload"
        # Before any rank is started: where there is no memory for it, nothing is to be undone.
        with sendable(packed) as payload, held():
            pool = self.start_ranks(request, plan, run=new.folder.id, log_dir=new.folder.path)
            restarts = None
            if request.config.max_restarts:
                restarts = _StartedAgain(self, request, new, payload)
            begin_call(pool, request, new, packed, payload, last=True, restarts=restarts)


def abandon(links: Iterable[AgentLink]) -> None:
    """End agents for which there is no run."""
    for link in links:
        link.channel.close()
        link.end()


def _launch_message(
    request: LaunchRequest, plan: RankPlan, *, run: str, start_method: str
) -> wire.Launch:
    """What starts the rank processes of a run, without each agent's own ranks and folder."""
    num_threads = num_threads_of(request.environment, plan.world_size)
    of_engine = {"OMP_NUM_THREADS": str(num_threads), **plan.environment}
    return wire.Launch(
        run=run,
        world_size=plan.world_size,
        ranks=(),
        environment=rank_environment(request.config, of_engine=of_engine),
        directory=os.getcwd(),
        path=tuple(import_path()),
        log_dir=None,
        num_threads=num_threads,
        start_method=start_method,
        notebook=request.notebook or pickle.dumps(capture(request.config.seed)),
    )


@contextlib.contextmanager
def sendable(packed: PackedCall) -> Iterator[tuple[wire.Packet, tuple[int, ...]]]:
    """A packed call as it goes into ``wire.Call``, with its descriptors, open inside the block."""
    packet, fds = pack(packed.packed)
    try:
        yield packet, fds
    finally:
        for fd in fds:
            os.close(fd)


def _call_message(request: LaunchRequest, packet: wire.Packet, *, last: bool) -> wire.Call:
    return wire.Call(
        payload=packet,
        grace=request.config.grace,
        last=last,
        keeps_error=request.keeps_error,
        by_value=request.detach,
    )


class _StartedAgain:
    """Starts the ranks of a launch again after a failure (``Restarts`` of control/supervisor.py).

    It keeps what the function was called with, which each attempt gets.
    """

    def __init__(
        self,
        engine: AgentEngine,
        request: LaunchRequest,
        new: NewRun,
        payload: tuple[wire.Packet, tuple[int, ...]],
    ) -> None:
        self._engine = engine
        self._request = request.without_function()
        self._folder = new.folder
        self._packet, fds = payload
        self._fds = tuple(map(os.dup, fds))
        self._num = request.config.max_restarts
        self.left = self._num

    @property
    def next_one(self) -> str:
        return f"the ranks are started again, {self._num - self.left + 1} of {self._num} times"

    def begin(self, call: Supervisor) -> None:
        self.left -= 1
        plan = self._engine.plan_again(self._request)
        attempt = {"TORCHELASTIC_RESTART_COUNT": str(self._num - self.left)}
        plan = replace(plan, environment={**plan.environment, **attempt})
        run = self._folder.id
        pool = self._engine.start_ranks(self._request, plan, run=run, log_dir=self._folder.path)
        try:
            call.renew(pool)
            pool.send_call(call, _call_message(self._request, self._packet, last=True), self._fds)
        except BaseException:
            pool.kill()
            raise
        finally:
            pool.start()

    def close(self) -> None:
        self._engine.close()
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)


def begin_call(
    pool: RankPool,
    request: LaunchRequest,
    new: NewRun,
    packed: PackedCall,
    payload: tuple[wire.Packet, tuple[int, ...]],
    *,
    last: bool,
    restarts: _StartedAgain | None = None,
) -> None:
    """Send a call to the ranks of a pool; its run has begun then.

    Args:
        pool: the ranks. With ``last`` it is one that was just started.
        request: what is called.
        new: the run of the call.
        packed: what is called, pickled.
        payload: the same as it is sent, of :func:`sendable`.
        last: whether the rank processes end after it.
        restarts: starts them again after a failure; None where that is not asked for.

    Raises:
        LaunchError: a call is running, or a rank process has ended.
    """
    # The run keeps what its advice needs, and none of its arguments: what the person drops while
    # it goes on is freed.
    advised = replace(packed, packed=Packed(b"")) if request.advise else None
    results = StoredResults(new.folder.path) if request.detach else Results(packed.registry)
    typed = run_list.expression_to_attach if request.detach else run_list.expression_now
    supervisor = Supervisor(
        pool=pool,
        state=new.state,
        results=results,
        metrics=new.metrics,
        view=request.view,
        timeout=request.timeout,
        closing_notices=lambda end: [
            *results.lost,
            *([] if advised is None else closing_advice(end, advised)),
        ],
        labels={source.filename: source.label for source in request.sources},
        folder=new.folder,
        handle=partial(typed, new.folder.id),
        restarts=restarts,
    )
    with pool.paused():
        pool.check_free()
        try:
            pool.send_call(supervisor, _call_message(request, payload[0], last=last), payload[1])
            # After the call has its number: who finds the run in the list may stop or kill it.
            new.begin(supervisor)
            request.view.open(new.run._without_results())
        except BaseException:
            # A session's other calls are not ours to end: kill only if this call was sent (it has a
            # number then), or the ranks exist for it alone.
            if supervisor.number or last:
                supervisor.kill()
            if restarts is not None:
                restarts.close()
            raise
        finally:
            # Also where the view could not open: without its thread nobody sees the ranks end.
            if last:
                pool.start()
