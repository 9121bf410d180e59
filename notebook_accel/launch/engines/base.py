"""Base class of engines: an engine plans the ranks of a launch and starts them.

    plan_ranks: LaunchRequest ---> RankPlan: the ranks of each agent
    start_ranks: RankPlan -------> RankPool, to which calls are sent (control/pool.py)
    begin: LaunchRequest --------> a Call that goes on: start ranks, call, end them

An engine whose ranks have agents writes ``plan_ranks`` and ``start_agents`` (``AgentEngine`` in
local.py); nothing else about ranks differs between engines.

An engine is given three records:

    LaunchRequest      what ranks are asked for, and the function that they are to call
    payload.PackedCall the function and its arguments, pickled
    NewCall            what the launcher made for the call: folder, first state

Of a LaunchRequest and a RankPlan comes the message ``wire.Launch``, which starts rank processes; of
a PackedCall the message ``wire.BeginCall``.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_accel.errors import ConfigError
from notebook_accel.launch import wire

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from notebook_accel.config import LaunchConfig
    from notebook_accel.launch.control.call import Call, NewCall
    from notebook_accel.launch.control.pool import RankPool
    from notebook_accel.launch.payload import PackedCall
    from notebook_accel.launch.request import LaunchRequest

__all__ = ["Engine", "RankPlan"]


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
    """The ranks of a launch by agent, their variables, and notices for the person.

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
    def of_sizes(cls, *sizes: int, **fields: Any) -> RankPlan:
        """Return a plan with one agent for each size, whose ranks differ only in their numbers.

        ``fields`` are the others of the plan.
        """
        firsts = itertools.accumulate(sizes, initial=0)
        agents = (
            tuple(wire.RankSpec(rank=first + local, local_rank=local) for local in range(size))
            for first, size in zip(firsts, sizes, strict=False)
        )
        return cls(agents=tuple(agents), **fields)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.agents))


class Engine(ABC):
    """Base class of the engines: plans the ranks of a launch and starts them.

    Attributes:
        description: names the engine in a line for the person.
        unused: arguments of ``notebook_launcher`` that it ignores.
        needs_payload: whether a call travels to its ranks, and so must be pickled.
        keeps_ranks: whether its ranks can stay for more calls, as those of a session do.
        can_detach: whether its runs can outlive the kernel.
    """

    description: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = _OF_SEVERAL_MACHINES
    needs_payload: ClassVar[bool] = True
    keeps_ranks: ClassVar[bool] = False
    can_detach: ClassVar[bool] = False

    def warm_up(self, request: LaunchRequest) -> None:
        """Do the slow, interruptible part of a start, before the run exists.

        Raises:
            LaunchError: what starts the ranks cannot be started itself.
        """
        return

    def check_here(self, config: LaunchConfig, environment: Mapping[str, str]) -> None:
        """Refuse settings that this machine cannot serve; nothing is started for the check.

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
        """Return the ranks of the launch, by agent, and their variables.

        Raises:
            ConfigError: more are asked for than there can be.
        """

    def num_ranks_here(self, request: LaunchRequest) -> int:
        """Return the number of ranks on this machine, without asking any other machine.

        Raises:
            ConfigError: more are asked for than there can be.
        """
        return self.plan_ranks(request).world_size

    @abstractmethod
    def begin(
        self, request: LaunchRequest, plan: RankPlan, packed: PackedCall | None, new: NewCall
    ) -> AbstractContextManager[Call]:
        """Start ranks for one call and send it; yields the call, whose run the block opens.

        Args:
            request: what is called.
            plan: which ranks there are to be.
            packed: what is called, pickled; None where the engine has no use for that.
            new: what the launcher made for the call.

        Raises:
            LaunchError: they could not be started; nothing is left of them.
        """

    def start_ranks(
        self, request: LaunchRequest, plan: RankPlan, *, run: str, log_dir: Path
    ) -> RankPool:
        """Start ranks that stay between calls; return their pool, whose thread is not started yet.

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
