"""Launches on several nodes of a Slurm job: reads Slurm's variables, and starts commands on nodes.

``srun --ntasks-per-node=1 COMMAND`` starts the command once on each node of the job. From the
variables that ``srun`` sets for the command, ``slurm_step`` reads all that a launch over these
nodes needs. A notebook, however, runs on one node of its job. Its launch uses ``OtherNodes`` to
start a command on each other node, which makes the node join the launch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from notebook_accel.errors import ConfigError

# Where no port is given, all nodes of a job choose the same one, and jobs that share a machine
# most likely different ones: above what Slurm itself uses, below what systems give out.
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000
# The first host of "node[03-05,9],gpu1", "a-1,b-2" or "rack[1-2]n[0-3]".
_FIRST_RANGE = re.compile(r"\[(\w+)[^\]]*\]")


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """A step of a Slurm job with one task on each of several nodes; this process is one of them."""

    num_nodes: int
    node_rank: int
    master_addr: str
    port: int


def slurm_step(environment: Mapping[str, str]) -> SlurmStep | None:
    """Return the step over several nodes in which this process is a task; None if there is none."""
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
        # A comma inside brackets separates numbers, not hosts.
        master_addr=_FIRST_RANGE.sub(r"\1", nodes).partition(",")[0],
        port=_FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _NUM_PORTS,
    )


class OtherNodes:
    """A command that ``srun`` runs on other nodes of this process's Slurm job.

    Attributes:
        said: what ``srun`` wrote to stderr; None while ``srun`` runs.
    """

    def __init__(
        self, command: Sequence[str], num_nodes: int, variables: Mapping[str, str]
    ) -> None:
        environment = {**os.environ, **variables}
        # The job's own numbers count all nodes, and would be taken for those of the step.
        options = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
        # Since Slurm 22.05 a step has one core a task, unless it asks.
        if cores := environment.get("SLURM_CPUS_PER_TASK"):
            options.append(f"--cpus-per-task={cores}")
        here = environment["SLURMD_NODENAME"]
        self.said: str | None = None
        self._process = subprocess.Popen(
            ["srun", "--overlap", "--export=ALL", f"--exclude={here}", *options, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # an interrupt of the kernel is not for it
        )
        threading.Thread(target=self._listen, name="srun", daemon=True).start()

    def _listen(self) -> None:
        _, self.said = self._process.communicate()

    def end(self) -> None:
        """End the command on all nodes."""
        self._process.terminate()


def has_other_nodes(environment: Mapping[str, str], num_nodes: int) -> bool:
    """Return whether a launch can use ``num_nodes`` other nodes of this process's Slurm job.

    The job must have at least that number of nodes besides the node of this process, and the
    command ``srun`` must exist. The result is False if this process belongs to no job.
    """
    is_on_node = "SLURMD_NODENAME" in environment and shutil.which("srun") is not None
    return is_on_node and int(environment.get("SLURM_JOB_NUM_NODES", "1")) > num_nodes
