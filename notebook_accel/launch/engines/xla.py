"""Engine with ranks on TPUs, through torch_xla.

    template process -> agent -> leader process, which calls ``xmp.spawn`` -> ranks

The notebook's kernel does not import torch_xla and holds no TPU chip, so that each launch finds the
chips free, and the function may be defined in a cell.
"""

from __future__ import annotations

from collections.abc import Mapping

from notebook_accel import tpu
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, LaunchError
from notebook_accel.launch.engines import RankPlan
from notebook_accel.launch.engines.local import LocalEngine
from notebook_accel.launch.launch_request import LaunchRequest


class XlaEngine(LocalEngine):
    """Engine with ranks on this machine's TPU, started by torch_xla (``engine="xla"``)."""

    description = "engine='xla', whose ranks are on this machine's TPU"
    start_method = "xla"

    def check_here(self, config: LaunchConfig, environment: Mapping[str, str]) -> None:
        self._find_devices(config, environment)

    def plan_ranks(self, request: LaunchRequest) -> RankPlan:
        platform, count = self._find_devices(request.config, request.environment)
        environment = {"PJRT_DEVICE": platform, "ACCELERATE_USE_CPU": "false"}
        return RankPlan.of_sizes(request.config.num_processes or count, environment=environment)

    def _find_devices(
        self, config: LaunchConfig, environment: Mapping[str, str]
    ) -> tuple[str, int]:
        """Check the settings; return (platform, number of devices), such as ("TPU", 8)."""
        found = tpu.library()
        if found is None:
            raise LaunchError(
                f"engine='xla' needs torch_xla, which is not installed: {tpu.INSTALL}"
            )
        if found.problem:
            raise LaunchError(f"engine='xla' cannot start: {found.problem}")
        if found.name == "torch_tpu":
            raise LaunchError(
                f"engine='xla' is for torch_xla, and torch_tpu {found.version} is installed: "
                "leave engine= out, and ranks use the TPU by torch_tpu"
            )
        platform, count = tpu.count_devices(environment)
        if not count:
            raise LaunchError(
                f"engine='xla' found no TPU (PJRT_DEVICE={platform or 'not set'}): choose a "
                "runtime with one, or another engine. PJRT_DEVICE=CPU tries the same code on the "
                "CPU, slowly"
            )
        wanted = config.num_processes
        if wanted not in (None, 1, count):
            raise ConfigError(
                f"num_processes={wanted}, and torch_xla starts 1 rank or one for each of the "
                f"{count} devices of the {platform}: leave it out for all {count}, or say 1"
            )
        if config.devices is not None:
            raise ConfigError(
                f"devices={config.devices!r}, and engine='xla' takes all devices of the "
                f"{platform}, or with num_processes=1 the first: leave devices out, or engine"
            )
        return platform, count
