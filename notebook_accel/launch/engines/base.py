"""What an engine must do: say which ranks a launch gets, and bring them about.

    plan_ranks: Start ----------> RankPlan: the ranks of each agent
    start_agents: RankPlan -----> AgentLinks, each of which waits for Launch
    start: links, Launch -------> RankPool, to which calls are sent (control/pool.py)
    open: Job ------------------> a run that goes on: start, one call, end

An engine with agents writes the first two; nothing else about ranks differs between engines.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from notebook_accel.errors import ConfigError
from notebook_accel.launch import wire
from notebook_accel.launch.control.interrupts import held
from notebook_accel.launch.control.pool import RankPool
from notebook_accel.launch.control.results import Results
from notebook_accel.launch.control.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.control.agent_link import AgentLink
    from notebook_accel.launch.control.metrics_file import MetricStore
    from notebook_accel.launch.control.run_folder import RunFolder
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.payload import CellSource
    from notebook_accel.launch.run import Conductor, Run
    from notebook_accel.launch.view import View

__all__ = [
    "AgentEngine",
    "Engine",
    "Job",
    "Opening",
    "PreparedCall",
    "RankPlan",
    "Start",
    "begin_call",
]


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
class Start:
    """What is asked of rank processes before anything is called on them.

    Attributes:
        name: what the person calls it, for the view.
        config: how to launch.
        environment: of every rank, whatever the engine adds.
        view: shows that they come.
        imports: modules that each rank imports first.
    """

    name: str
    config: LaunchConfig
    environment: dict[str, str]
    view: View
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Job(Start):
    """One call of the launcher: what is called, on rank processes that are started for it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: tuple[CellSource, ...]
    timeout: float | None
    advise: bool = True


@dataclass(frozen=True, kw_only=True)
class PreparedCall:
    """What a call sends to the ranks, and how to read what comes back.

    Attributes:
        payload: the packed function, with its arguments.
        fds: descriptors that belong to it; whoever prepared it closes them.
        registry: for the results.
        closing_notices: lines for the person that only the last state can tell.
    """

    payload: wire.Packet
    fds: tuple[int, ...]
    registry: Any
    closing_notices: Callable[[RunState], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Which ranks a launch gets.

    Attributes:
        agents: the ranks of each agent, numbered over all agents; the first one has rank 0.
        environment: variables of every rank that tell where it runs.
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
        """One agent of each size, whose ranks have nothing but their numbers of their own."""
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
class Opening:
    """A run that is about to begin.

    Attributes:
        run: the handle; it gets its conductor.
        state: before anything of it exists.
        folder: of its logs and metrics.
        metrics: where they are written.
        call: what is sent to the ranks; None for engines that send nothing.
        plan: which ranks are to be started for it.
        launch: what starts the ranks; None where there are some, or none are needed.
    """

    run: Run
    state: RunState
    folder: RunFolder
    metrics: MetricStore
    call: PreparedCall | None
    plan: RankPlan | None = None
    launch: wire.Launch | None = None


class Engine(ABC):
    """A way to bring ranks about.

    Attributes:
        description: names the engine in a line for the person.
        unused: arguments of ``notebook_launcher`` for which it has no use.
        max_ranks: how many ranks it can have; None: any number.
        needs_payload: whether a call travels to its ranks, and so must be pickled.
    """

    description: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = _OF_SEVERAL_MACHINES
    max_ranks: ClassVar[int | None] = None
    needs_payload: ClassVar[bool] = True

    def warm_up(self, job: Start) -> None:
        """What takes long and may be interrupted, before anything of the run exists.

        Raises:
            LaunchError: what starts the ranks cannot be started itself.
        """
        return

    @abstractmethod
    def plan_ranks(self, job: Start) -> RankPlan:
        """How many ranks the job gets, behind which agents, and what tells them where they run.

        Raises:
            ConfigError: more are asked for than there can be.
        """

    @abstractmethod
    def open(self, job: Job, opening: Opening) -> Conductor:
        """Start ranks for this one call; gives who conducts it.

        Args:
            job: what is called.
            opening: the run of the call.

        Raises:
            LaunchError: they could not be started; nothing is left of them.
        """

    def start(self, job: Start, plan: RankPlan, launch: wire.Launch, *, log_dir: Path) -> RankPool:
        """Start ranks that stay between calls; gives the pool of them, not yet listened to.

        Args:
            job: what is asked of them.
            plan: which ranks there are.
            launch: what their agents are sent, each with its own ranks.
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

    @abstractmethod
    def start_agents(self, job: Start, plan: RankPlan, *, run: str) -> list[AgentLink]:
        """One agent for each of the plan, in its order, each of which waits for ``Launch``.

        Raises:
            LaunchError: one could not be started; nothing is left of the others.
        """

    def start(self, job: Start, plan: RankPlan, launch: wire.Launch, *, log_dir: Path) -> RankPool:
        with held():
            links = self.start_agents(job, plan, run=launch.run)
            try:
                pool = RankPool(links, run=launch.run, grace=job.config.grace, log_dir=log_dir)
                for link in links:
                    folder = str(log_dir) if link.sees_files else None
                    pool.launch(
                        link, msgspec.structs.replace(launch, ranks=link.ranks, log_dir=folder)
                    )
            except BaseException:
                for link in links:
                    link.channel.close()
                    link.kill()
                raise
            return pool

    def open(self, job: Job, opening: Opening) -> Conductor:
        assert opening.plan is not None
        assert opening.launch is not None
        assert opening.call is not None
        with held():
            pool = self.start(job, opening.plan, opening.launch, log_dir=opening.folder.path)
            return begin_call(pool, job, opening, opening.call, last=True)


def begin_call(
    pool: RankPool, job: Job, opening: Opening, call: PreparedCall, *, last: bool
) -> Supervisor:
    """Send a call to the ranks of a pool; gives who conducts it.

    Args:
        pool: the ranks. With ``last`` it is one that was just started.
        job: what is called.
        opening: the run of the call.
        call: what is sent.
        last: whether the rank processes end after it.

    Raises:
        LaunchError: a call is running, or a rank process has ended.
    """
    supervisor = Supervisor(
        pool=pool,
        state=opening.state,
        results=Results(call.registry),
        metrics=opening.metrics,
        view=job.view,
        timeout=job.timeout,
        closing_notices=call.closing_notices,
        labels={source.filename: source.label for source in job.sources},
        folder=opening.folder,
    )
    with pool.paused():
        pool.check_free()
        try:
            opening.run.attach(supervisor)
            pool.begin_call(
                supervisor,
                payload=call.payload,
                fds=call.fds,
                grace=job.config.grace,
                last=last,
            )
            job.view.open(opening.run.without_results())
        except BaseException:
            # Of a session, only what was sent: its ranks are not this call's alone.
            if supervisor.number or last:
                supervisor.kill()
            raise
        finally:
            # Of a run that could not be shown, too: somebody must see it end.
            if last:
                pool.start()
    return supervisor
