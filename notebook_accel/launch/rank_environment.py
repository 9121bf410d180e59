"""The environment variables that are common to all ranks of a launch.

They are merged from four sources, and a later one wins:

    the notebook's environment, without variables that would mislead a rank
        <- what the settings ask for <- what the engine adds <- ``env=``

Variables of a single rank, such as RANK, come on top (worker/main.py). By default
GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the loopback interface, so that collectives of ranks
on one machine do not use the network.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

from notebook_accel.config import LaunchConfig, settings_of
from notebook_accel.config.plugins import PLUGINS
from notebook_accel.errors import ConfigError
from notebook_accel.system.processes import kept_environment

# On a CPU, Hugging Face Accelerate in a rank makes a world of one, unless this says that the CPU
# is meant.
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
_VISIBLE = "CUDA_VISIBLE_DEVICES"
WITHOUT_DEVICES = {_VISIBLE: ""}
# What hides devices of kinds that do not read CUDA's variable.
VISIBLE_OF_KIND = {
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
# On AMD devices HIP reads its own variable before CUDA's, and numbers those that ROCR's leaves,
# which a scheduler sets.
_HIP = "HIP_VISIBLE_DEVICES"
_ROCR = "ROCR_VISIBLE_DEVICES"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_DEFAULTS = dict.fromkeys(INTERFACES, "lo")


def rank_environment(
    config: LaunchConfig,
    *,
    of_engine: Mapping[str, str] | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment variables of every rank of a launch with these settings.

    Args:
        base: for ranks on another machine, the variables of that machine; None for
            :func:`kept_environment`.
    """
    kept = kept_environment() if base is None else base
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(config.use_port or 0)}
    if config.devices == "cpu":
        variables.update(ON_CPU)
    elif isinstance(config.devices, tuple):
        variables[_VISIBLE] = _among_visible(config.devices)
        if _HIP in os.environ or _ROCR in os.environ:
            variables[_HIP] = _among_visible(config.devices, _HIP)
        variables["ACCELERATE_USE_CPU"] = "false"
    for name, row in settings_of(LaunchConfig).items():
        value = getattr(config, name)
        if row.is_for_ranks and value is not None:
            variables |= dict.fromkeys(row.variables, str(value))
    for name, plugin in PLUGINS.items():
        options = getattr(config, name)
        if options is not None:
            variables.update(plugin.variables(options))
    if config.debug:
        variables["NOTEBOOK_ACCEL_DEBUG"] = "1"
    return {**_DEFAULTS, **kept, **variables, **(of_engine or {}), **(config.env or {})}


def variables_of_choice(devices: object, kind: str) -> dict[str, str]:
    """Return what shows ranks only the chosen devices, for a kind that does not read CUDA's."""
    variable = VISIBLE_OF_KIND.get(kind)
    if variable is None or not isinstance(devices, tuple):
        return {}
    return {variable: _among_visible(devices, variable)}


def _among_visible(devices: Sequence[int], variable: str = _VISIBLE) -> str:
    """Return the value of a variable that shows ranks only the chosen devices."""
    given = os.environ.get(variable)
    if given is None:
        return ",".join(map(str, devices))
    # CUDA reads no further than to the first that is none: "-1" hides all behind it.
    visible = [*itertools.takewhile(lambda name: name.strip() not in ("", "-1"), given.split(","))]
    if not visible:
        raise ConfigError(
            f"devices={list(devices)}, but {variable}={given!r} hides all accelerators from the "
            f"notebook: del os.environ[{variable!r}] before, or launch with devices='cpu'"
        )
    if max(devices) >= len(visible):
        raise ConfigError(
            f"devices={list(devices)}, but {variable}={','.join(visible)} leaves only "
            f"the indices 0 to {len(visible) - 1}: choose among these, or leave devices= out for "
            "all of them"
        )
    return ",".join(visible[index] for index in devices)


def num_threads_of(environment: Mapping[str, str], num_ranks: int, cores: int | None = None) -> int:
    """Return the number of threads of a rank: OMP_NUM_THREADS, or an equal share of the cores.

    Args:
        cores: number of cores of that machine; None if it is this machine (:func:`num_cores`).
    """
    # OpenMP takes a number for each level of nested regions; a rank's is the outermost.
    given = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given.isdecimal() and int(given):
        return int(given)
    return max(1, (num_cores() if cores is None else cores) // num_ranks)


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
