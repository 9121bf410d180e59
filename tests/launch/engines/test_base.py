"""A plan numbers the ranks over all agents."""

from __future__ import annotations

from notebook_accel.launch.engines.base import RankPlan
from notebook_accel.launch.wire import RankSpec


def test_ranks_are_numbered_over_all_agents() -> None:
    plan = RankPlan.of_sizes(2, 1, environment={"A": "b"}, notices=("line",))
    assert plan.agents == (
        (RankSpec(rank=0, local_rank=0), RankSpec(rank=1, local_rank=1)),
        (RankSpec(rank=2, local_rank=0),),
    )
    assert (plan.world_size, plan.environment, plan.notices) == (3, {"A": "b"}, ("line",))
