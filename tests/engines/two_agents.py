"""A stand-in for engines of several machines: two agents on this one, each as if it were far away.

One template forks both. They speak TCP over the loopback with the kernel, so that nothing travels
as a descriptor, and neither of them may write into the run's folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from notebook_accel.launch import engines, wire
from notebook_accel.launch.engines.base import RankPlan
from notebook_accel.launch.engines.local import LocalEngine, fork_agent, tcp_pair

if TYPE_CHECKING:
    from notebook_accel.launch.control.agent_link import AgentLink
    from notebook_accel.launch.request import LaunchRequest

__all__ = ["NAME", "TwoAgentsEngine", "register", "tcp_pair"]

NAME = "two agents"


class TwoAgentsEngine(LocalEngine):
    """Ranks on the CPU behind two agents; a world of one has one agent."""

    description = "engine='two agents', which tests alone have"

    def plan_ranks(self, request: LaunchRequest) -> RankPlan:
        plan = super().plan_ranks(request)
        first = (plan.world_size + 1) // 2
        sizes = [size for size in (first, plan.world_size - first) if size]
        plan = RankPlan.of_sizes(*sizes, environment=plan.environment)
        agents = tuple(tuple(map(_with_own, ranks)) for ranks in plan.agents)
        return replace(plan, agents=agents)

    def start_agents(self, request: LaunchRequest, plan: RankPlan, *, run: str) -> list[AgentLink]:
        links: list[AgentLink] = []
        try:
            for ranks in plan.agents:
                link = fork_agent(request.environment, ranks, tcp_pair, run=run, sees_files=False)
                links.append(link)
        except BaseException:
            for link in links:
                link.channel.close()
                link.kill()
            raise
        return links


def _with_own(spec: wire.RankSpec) -> wire.RankSpec:
    """The rank with a variable of its own, and a device that is not its local rank."""
    own = {"OWN": f"of rank {spec.rank}", "NOTEBOOK": "no"}
    return msgspec.structs.replace(spec, environment=own, device=spec.rank + 5)


def register() -> None:
    """Let launches of this process name the engine."""
    engines.ENGINES[NAME] = TwoAgentsEngine
