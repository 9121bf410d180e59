"""What an engine must do: bring a run's ranks about, and say what it needs for that."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_accel.launch.control.interrupts import held
from notebook_accel.launch.control.results import Results
from notebook_accel.launch.control.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch import wire
    from notebook_accel.launch.control.agent_link import AgentLink
    from notebook_accel.launch.control.state import RunState
    from notebook_accel.launch.control.stores import MetricStore, RunFolder
    from notebook_accel.launch.payload import CellSource
    from notebook_accel.launch.run import Conductor, Run
    from notebook_accel.launch.view import View

__all__ = ["AgentEngine", "Engine", "Job", "Opening", "Placement", "Prepared"]


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
class Job:
    """One call of the launcher, ready to go."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    config: LaunchConfig
    environment: dict[str, str]
    sources: tuple[CellSource, ...]
    view: View
    timeout: float | None
    imports: tuple[str, ...] = ()
    advise: bool = True


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a launch sends: the message with its descriptors, and how to read what returns."""

    message: wire.Launch
    fds: tuple[int, ...]
    registry: Any
    closing_notices: Callable[[RunState], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A run that is about to begin; ``prepared`` is None for engines that send nothing."""

    run: Run
    state: RunState
    folder: RunFolder
    metrics: MetricStore
    prepared: Prepared | None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Number of ranks, variables that tell them where they run, and lines for the person."""

    world_size: int
    environment: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


class Engine(ABC):
    """A way to bring ranks about.

    Attributes:
        description: names the engine in a line for the person.
        unused: arguments of ``notebook_launcher`` for which it has no use.
    """

    description: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = _OF_SEVERAL_MACHINES
    needs_payload = True

    def warm_up(self, job: Job) -> None:
        """What takes long and may be interrupted, before anything of the run exists.

        Raises:
            LaunchError: what starts the ranks cannot be started itself.
        """
        return

    @abstractmethod
    def place(self, job: Job) -> Placement:
        """How many ranks the job gets, and on what.

        Raises:
            ConfigError: more are asked for than there can be.
        """

    @abstractmethod
    def open(self, job: Job, opening: Opening) -> Conductor:
        """Start the ranks; gives who conducts them.

        Raises:
            LaunchError: they could not be started; nothing is left of them.
        """


class AgentEngine(Engine):
    """An engine whose ranks are held by an agent."""

    @abstractmethod
    def bring_agent(self, job: Job, *, run: str) -> AgentLink:
        """An agent that waits for its ``Launch`` message."""

    def open(self, job: Job, opening: Opening) -> Conductor:
        assert opening.prepared is not None
        with held():
            link = self.bring_agent(job, run=opening.state.run)
            return _begin(link, job, opening, opening.prepared)


def _begin(link: AgentLink, job: Job, opening: Opening, prepared: Prepared) -> Conductor:
    supervisor = Supervisor(
        link=link,
        state=opening.state,
        results=Results(prepared.registry),
        folder=opening.folder,
        metrics=opening.metrics,
        view=job.view,
        timeout=job.timeout,
        closing_notices=prepared.closing_notices,
        labels={source.filename: source.label for source in job.sources},
    )
    opening.run.attach(supervisor)
    try:
        # An agent that is dead already is the supervisor's to tell.
        with contextlib.suppress(OSError):
            link.channel.send(prepared.message, prepared.fds)
        job.view.open(opening.run.without_results())
    except BaseException:
        supervisor.kill()
        raise
    finally:
        supervisor.start()
    return supervisor
