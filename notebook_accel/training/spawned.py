"""What a process is told that ``torch.multiprocessing`` starts, before it trains."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_accel.errors import ConfigError
from notebook_accel.training.environment import get_int_from_env
from notebook_accel.training.settings import DistributedType

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PrepareForLaunch", "env_var_path_add"]

_MEETING_FILE = "ACCELERATE_DEBUG_RDV_FILE"


class PrepareForLaunch:
    """A function as ``torch.multiprocessing.spawn`` calls it: with the number of its process first.

    ``notebook_launcher`` needs none of it. The call sets variables of the process, and then calls
    the function with the other arguments.

    Args:
        launcher: the function.
        distributed_type: "MULTI_CPU", "MULTI_GPU" and their like set LOCAL_RANK to the number and
            RANK by NPROC, the processes of a machine, and NODE_RANK; others leave them.
        debug: meet WORLD_SIZE processes over gloo instead, by the file that the variable
            ACCELERATE_DEBUG_RDV_FILE names.

    Raises:
        ConfigError: as it is called with ``debug``, and one of the two variables is not set.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        if self.debug:
            _meet(index)
        elif self.distributed_type.startswith("MULTI_"):
            before = get_int_from_env(["NODE_RANK"], 0) * get_int_from_env(["NPROC"], 1)
            os.environ.update(LOCAL_RANK=str(index), RANK=str(before + index))
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)


def _meet(rank: int) -> None:
    missing = [name for name in ("WORLD_SIZE", _MEETING_FILE) if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"PrepareForLaunch(debug=True) meets the other processes by variables, and "
            f"{' and '.join(missing)} is not set: set both, or use debug_launcher"
        )
    size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ[_MEETING_FILE], size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=rank, store=store, world_size=size)


def env_var_path_add(env_var_name: str, path_to_add: Any) -> str:
    """The text of a variable that lists paths (PYTHONPATH, say), with one more at its end."""
    known = [path for path in os.environ.get(env_var_name, "").split(":") if path]
    return ":".join([*known, str(path_to_add)])
