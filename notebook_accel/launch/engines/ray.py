"""Engine with ranks on the nodes of a Ray cluster.

    plan_ranks: placement group -> number of ranks on each node -> one Ray actor on each node
    actor: elastic.join --> MachineServer (machines.py)

Ray only chooses the nodes and starts the actors. Each actor joins its node to the run, just as
``notebook-accel join`` joins a machine with ``engine="elastic"``; from then on everything works as
with that engine, over notebook_accel's own connections.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines import RankPlan
from notebook_accel.launch.engines.elastic import join
from notebook_accel.launch.engines.machines import (
    JoinedMachine,
    MachinesEngine,
    notices_of,
    torchelastic_variables,
)
from notebook_accel.launch.launch_request import LaunchRequest
from notebook_accel.private.of_libraries import without_debugger

# A cluster that scales itself up needs minutes for a node.
_PLACE_SECONDS = 300.0
# An actor's process starts, and then the template on its node.
_JOIN_SECONDS = 120.0
_POLL_SECONDS = 0.05
# Until the cell says that it waits: room that is free is found sooner.
_SAY_SECONDS = 1.0


class RayEngine(MachinesEngine):
    """Engine with ranks on the nodes of a Ray cluster (``engine="ray"``)."""

    description = "engine='ray', whose ranks are on the nodes of a Ray cluster"

    def __init__(self) -> None:
        super().__init__()
        self._actors: list[Any] = []

    def num_awaited(self, config: LaunchConfig) -> int:
        return config.num_processes or 1

    def plan_ranks(self, request: LaunchRequest) -> RankPlan:
        ray = _connected()
        ranks_of_nodes = _place(ray, request)
        try:
            return self._plan_on(self._gather(ray, ranks_of_nodes, request), request)
        except BaseException:
            for actor in self._actors:
                ray.kill(actor)
            raise

    def _gather(
        self, ray: Any, ranks_of_nodes: Mapping[str, int], request: LaunchRequest
    ) -> list[JoinedMachine]:
        server = self._listen("", 0, len(ranks_of_nodes))
        address = f"{ray.util.get_node_ip_address()}:{server.port}"
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        has_gpus = "GPU" in _resources_of_rank(ray, request.config)
        starting = []
        for node, num_ranks in ranks_of_nodes.items():
            of_node = {
                "num_cpus": num_ranks,
                "num_gpus": num_ranks if has_gpus else 0,
                "scheduling_strategy": affinity(node, soft=False),
            }
            actor = ray.remote(_NodeActor).options(**of_node).remote()
            self._actors.append(actor)
            starting.append(actor.join.remote(address, str(server.token), num_ranks))
        deadline = time.monotonic() + _JOIN_SECONDS
        while len(server.machines) < len(starting):
            request.poll()
            ended, _ = ray.wait(starting, timeout=_POLL_SECONDS)
            if ended or time.monotonic() >= deadline:
                why = f" in {_JOIN_SECONDS:g} s"
                try:
                    ray.get(ended)
                except Exception as error:  # whatever Ray or the actor raised
                    why = f": {error}"
                raise LaunchError(
                    f"{len(server.machines)} of {len(starting)} nodes of the Ray cluster came to "
                    f"{address}{why}. Is notebook-accel installed on all of them, and "
                    "can they reach this machine?"
                )
        return list(server.machines)

    def _plan_on(self, machines: list[JoinedMachine], request: LaunchRequest) -> RankPlan:
        """Return the plan of ranks on these machines, which become the machines of the run."""
        if not machines:
            raise LaunchError("no node of the Ray cluster is left: launch again")
        self._machines = machines
        environment = {
            "MASTER_ADDR": machines[0].link.peer_address,
            "MASTER_PORT": str(request.config.use_port or 0),
            **torchelastic_variables(request.config),
        }
        sizes = [machine.info.num_ranks for machine in machines]
        plan = RankPlan.of_sizes(*sizes, environment=environment)
        return replace(plan, notices=notices_of(machines))


class _NodeActor:
    """Ray actor on one node of the cluster, which joins the node to the run."""

    def join(self, address: str, token: str, num_ranks: int) -> None:
        import ray

        # Ray sets it to the CPUs of all ranks here, where nobody else has. A rank has one of them.
        if "OMP_NUM_THREADS" not in psutil.Process().environ():
            os.environ["OMP_NUM_THREADS"] = "1"
        join(address, token, tell=logging.getLogger(__name__).info, num_ranks=num_ranks)
        # Whoever still has its handle: what it holds of the node is free for others.
        ray.actor.exit_actor()


def _connected() -> Any:
    """Return the module ray, connected to a cluster."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise LaunchError(
            "engine='ray' needs the package ray: pip install 'notebook-accel[ray,elastic]', then "
            "launch again"
        ) from None
    if not ray.is_initialized():
        with without_debugger():
            ray.init(log_to_driver=False)
    return ray


def num_places(config: LaunchConfig) -> tuple[int, int]:
    """Return for how many ranks a cluster has room in all, and how many more it has room for now.

    Raises:
        LaunchError: Ray is not installed.
    """
    ray = _connected()
    names = _resources_of_rank(ray, config)
    now, in_all = ray.available_resources(), ray.cluster_resources()
    total, free = (int(min(found.get(name, 0) for name in names)) for found in (in_all, now))
    return total, free


def _resources_of_rank(ray: Any, config: LaunchConfig) -> list[str]:
    """Return of what each rank takes one."""
    has_gpus = config.devices != "cpu" and bool(ray.cluster_resources().get("GPU"))
    return ["CPU", "GPU"] if has_gpus else ["CPU"]


def _place(ray: Any, request: LaunchRequest) -> Counter[str]:
    """Have Ray choose nodes for the ranks; return the number of ranks by Ray's id of the node."""
    resources = ray.cluster_resources()
    names = _resources_of_rank(ray, request.config)
    num_ranks = request.config.num_processes or (int(resources["GPU"]) if "GPU" in names else 1)
    is_short = any(resources.get(name, 0) < num_ranks for name in names)
    bundle = dict.fromkeys(names, 1)
    nodes = {} if is_short else _nodes_for([bundle] * num_ranks, ray, request)
    if not nodes:
        has = ", ".join(f"{resources.get(name, 0):g} {name}s" for name in names)
        raise LaunchError(
            f"num_processes={num_ranks}, and the Ray cluster has {has}, of which others may use "
            "some: each rank takes one. Ask for fewer, or wait until there is room"
        )
    return Counter(nodes.values())


def _nodes_for(bundles: list[dict[str, int]], ray: Any, request: LaunchRequest) -> dict[int, str]:
    """Wait until the cluster has room; return Ray's id of the node of each bundle, or {}."""
    group = ray.util.placement_group(bundles, strategy="PACK")
    began, has_said = time.monotonic(), False
    try:
        # `group.wait` is one call in C, which no interrupt ends.
        while (table := ray.util.placement_group_table(group))["state"] != "CREATED":
            waited = time.monotonic() - began
            if waited >= _PLACE_SECONDS:
                return {}
            if waited >= _SAY_SECONDS and not has_said:
                has_said = True
                what = " and ".join(f"{len(bundles)} {name}s" for name in bundles[0])
                request.view.waits_for_machines(
                    f"{request.name}: waits for {what} of the Ray cluster"
                )
            request.poll()
            time.sleep(_POLL_SECONDS)
        return dict(table["bundles_to_node_id"])
    finally:
        # The actors take its place: one has all that its node's ranks need. A group that found no
        # room would take it later, and keep it.
        ray.util.remove_placement_group(group)
