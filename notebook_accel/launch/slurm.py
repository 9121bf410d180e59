"""What Slurm says of the step in which this process runs: which node of how many.

``srun --ntasks-per-node=1 COMMAND`` starts the command once on each node of the job; the variables
that it sets there are what a launch over these nodes needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SlurmStep", "slurm_step"]

# Where no port is given, all nodes of a job choose the same one, and jobs that share a machine
# most likely different ones: above what Slurm itself uses, below what systems give out.
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000
# The first host of "node[03-05,9],gpu1", "a-1,b-2" or "rack[1-2]n[0-3]".
_FIRST_RANGE = re.compile(r"\[(\w+)[^\]]*\]")


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """One task on each of several nodes.

    Attributes:
        num_nodes: of the step.
        node_rank: of this one.
        master_addr: the host of the first.
        port: one that all nodes of the job choose alike.
    """

    num_nodes: int
    node_rank: int
    master_addr: str
    port: int


def slurm_step(environment: Mapping[str, str]) -> SlurmStep | None:
    """The step of several nodes that this process belongs to; None for none.

    Raises:
        ConfigError: the step starts several of these processes on each node.
    """
    num_nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if num_nodes < 2:
        return None
    num_tasks = int(environment.get("SLURM_STEP_NUM_TASKS", str(num_nodes)))
    if num_tasks != num_nodes:
        raise ConfigError(
            f"srun starts {num_tasks} tasks on {num_nodes} nodes; expected one a node, which "
            "starts the ranks there: srun --ntasks-per-node=1"
        )
    nodes = environment["SLURM_STEP_NODELIST"]
    return SlurmStep(
        num_nodes=num_nodes,
        node_rank=int(environment["SLURM_NODEID"]),
        master_addr=_first_host(nodes),
        port=_FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _NUM_PORTS,
    )


def _first_host(nodes: str) -> str:
    # A comma inside brackets separates numbers, not hosts.
    return _FIRST_RANGE.sub(r"\1", nodes).partition(",")[0]
