"""A stand-in for other machines: threads of this process join its launches over the loopback."""

import contextlib
import threading
from dataclasses import replace

from notebook_accel.config.engines import ENGINES, EngineKind
from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines import RankPlan
from notebook_accel.launch.engines.elastic import ElasticEngine, join
from notebook_accel.launch.engines.machines import MachineServer
from notebook_accel.launch.launch_request import LaunchRequest

NAME = "elastic, joined"
KIND = EngineKind(
    about="two machines", path=f"{__name__}:JoinedEngine", obeys=("num_nodes", "max_restarts")
)


class JoinedEngine(ElasticEngine):
    """The ranks that are asked for, on two machines that are both this one; one rank on one."""

    def plan_ranks(self, request: LaunchRequest) -> RankPlan:
        num_ranks = request.config.num_processes or 1
        if num_ranks == 1:
            return super().plan_ranks(request)
        first = (num_ranks + 1) // 2
        config = replace(
            request.config, num_nodes=2, num_processes=first, master_addr="127.0.0.1", engine="auto"
        )
        plan = super().plan_ranks(replace(request, config=config))
        return RankPlan.of_sizes(first, num_ranks - first, environment=plan.environment)

    def _listen(self, host: str, port: int, wanted: int) -> MachineServer:
        server = super()._listen(host, port, wanted)
        address = f"127.0.0.1:{server.port}"
        threading.Thread(target=_join, args=(address, str(server.token)), daemon=True).start()
        return server


def _join(address: str, token: str) -> None:
    with contextlib.suppress(LaunchError):
        join(address, token, tell=lambda _: None)


def register() -> None:
    ENGINES[NAME] = KIND
