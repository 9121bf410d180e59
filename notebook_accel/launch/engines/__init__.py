"""Engines, which plan the ranks of a launch and start them: a file each, and their base class here.

    plan_ranks: LaunchRequest ---> RankPlan: the ranks of each agent
    start_ranks: RankPlan -------> RankPool, to which calls are sent (control/pool.py)
    begin: LaunchRequest --------> a running Call: start ranks, call the function, end the ranks

An agent is a helper process that starts and watches the ranks of one machine. An engine whose ranks
are started by agents implements only ``plan_ranks`` and ``start_agents`` (``AgentEngine`` in
local.py).

An engine is given three records:

    LaunchRequest      the user's settings, function and arguments
    payload.PackedCall the function and its arguments, pickled
    NewCall            what the launcher prepared for the call: request, folder, first state

From a LaunchRequest and a RankPlan the engine makes the message ``wire.Launch``, which has an agent
start rank processes. A PackedCall becomes the message ``wire.BeginCall``, which has the ranks call
the function.

A new engine is a new file here, with a class derived from :class:`AgentEngine` of ``local.py`` (or
:class:`Engine`), and its row in ``config/engines.py``, the one table of engines.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from notebook_accel import tpu
from notebook_accel.config import LaunchConfig
from notebook_accel.config.engines import ENGINES
from notebook_accel.errors import ConfigError
from notebook_accel.launch.control.call import Call, NewCall
from notebook_accel.launch.control.pool import RankPool
from notebook_accel.launch.control.run_folder import RunFolder
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.launch.payload import PackedCall

# Arguments of Accelerate's notebook_launcher that only a launch over several machines reads. Here
# they are accepted, and a line says that they are not used (`Engine.unused`).
_OF_SEVERAL_MACHINES = (
    *("master_addr", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "rdzv_id"),
    *("monitor_interval", "log_line_prefix_template"),
)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The ranks that an engine is to start for a launch: their numbers, grouped by agent."""

    agents: tuple[tuple[int, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    is_awaited: bool = False
    devices: tuple[int, ...] = ()

    @classmethod
    def of_sizes(cls, *sizes: int, **fields: Any) -> RankPlan:
        """Return a plan with one agent for each size."""
        ends = itertools.accumulate(sizes)
        agents = (tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))
        return cls(agents=tuple(agents), **fields)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.agents))


class Engine(ABC):
    """Base class of the engines: plans the ranks of a launch and starts them."""

    description: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = _OF_SEVERAL_MACHINES
    starts_ranks: ClassVar[bool] = True
    can_detach: ClassVar[bool] = False

    def warm_up(self, request: LaunchRequest) -> None:
        """Do the slow part of a start, such as waiting until torch is imported.

        Called before the run exists, so that an interrupt by the user leaves nothing behind. The
        default does nothing.
        """
        return

    def check_here(self, config: LaunchConfig, environment: Mapping[str, str]) -> None:
        """Raise an error if this machine cannot run a launch with these settings."""
        return

    @abstractmethod
    def plan_ranks(self, request: LaunchRequest) -> RankPlan:
        """Decide how many ranks the launch has, and which agents start them; return the plan."""

    def num_awaited(self, config: LaunchConfig) -> int:
        """Return how many ranks are expected if ``plan_ranks`` waits for machines, else 0."""
        return 0

    @abstractmethod
    def begin(
        self, plan: RankPlan, packed: PackedCall | None, new: NewCall
    ) -> AbstractContextManager[Call]:
        """Start ranks for one call, send the call to them, and yield the call.

        Within the block the launcher makes the run's handle and opens its view; no message from the
        ranks is handled before the block has ended.

        Args:
            packed: the pickled function with its arguments; None if ``starts_ranks`` is False.
        """

    def start_ranks(self, request: LaunchRequest, plan: RankPlan, folder: RunFolder) -> RankPool:
        """Start ranks that wait for calls and print into files of ``folder``; return their pool.

        The caller must start the pool's thread, which listens to the ranks (``RankPool.start``).
        """
        raise ConfigError(
            f"a session needs ranks that stay between calls, and {self.description} has none: "
            "choose another engine"
        )

    def close(self, outcome: str = "failed") -> None:
        """Release what was needed to start ranks, such as connected machines."""
        return


def engine_for(config: LaunchConfig) -> Engine:
    """Return a new engine, chosen by ``config.engine``.

    "auto" chooses "xla" if torch_xla finds a TPU and ``config.devices`` is None, else the local
    engine.
    """
    on_tpu = config.engine == "auto" and config.devices is None and tpu.is_torch_xlas()
    module, _, name = ENGINES["xla" if on_tpu else config.engine].path.partition(":")
    engine: Engine = getattr(import_module(module, __name__), name)()
    return engine
