"""The topology of this rank: rank, world size, device and backend, determined once and kept.

They come from the process group if the user made one, else from the launcher of this package, else
from environment variables. If there are several ranks and no process group yet, it is made here.

The ranks of a notebook live on from cell to cell. A cell that fails on one rank leaves the others
waiting in a collective, so afterwards all ranks destroy their process group. Models that the user
prepared in earlier cells must still train::

    cell that failed --> ranks without a process group --> renew_group, on all ranks together
                                                             |--> a new process group
                                                             '--> DDP wraps each model in it again
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from notebook_accel.errors import ConfigError
from notebook_accel.private import of_torch
from notebook_accel.rank.this_rank import RankContext, current, has_context, has_process_group
from notebook_accel.training.collectives import Exchange, exchange, gather_object
from notebook_accel.training.processes import devices
from notebook_accel.training.processes.process_group import open_process_group
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.handlers import DistributedType, InitProcessGroupKwargs

_listeners: list[Callable[[Topology], None]] = []


@dataclass(frozen=True)
class Topology:
    """Rank, number of ranks, device and backend of this process; made by :func:`establish`."""

    process_index: int
    """Rank of this process."""
    num_processes: int
    """Number of ranks."""
    local_process_index: int
    """Rank of this process on its machine."""
    local_num_processes: int
    """Number of ranks on this machine."""
    device: torch.device
    """Where this rank computes."""
    backend: str | None
    """Backend of the process group for this device; None where there is no group."""
    pid: int
    """Process that found this out."""

    @property
    def distributed_type(self) -> DistributedType:
        """The ``DistributedType`` that follows from the device and the number of ranks."""
        return devices.distributed_type(self.device, self.num_processes)


def topology() -> Topology:
    """Return the topology of this rank; the first call determines it by :func:`establish`."""
    found: Topology | None = current().shared.get(Topology)
    return establish() if found is None else found


def establish(*, cpu: bool = False, options: InitProcessGroupKwargs | None = None) -> Topology:
    """Return the topology of this rank; with several ranks, make the process group if missing.

    If the group is still to be made, all ranks have to call this, since making it waits for all of
    them. The topology is cached: later calls ignore ``cpu``, and use ``options`` only to replace a
    process group that was destroyed.

    Args:
        options: the user's settings of the process group; None for defaults.
    """
    shared = current().shared
    found: Topology | None = shared.get(Topology)
    options = options or InitProcessGroupKwargs()
    if found is None or _is_stale(found):
        found = shared[Topology] = _find(cpu=cpu, options=options)
        for listener in _listeners:
            listener(found)
    elif found.num_processes > 1 and not (has_process_group() or exchange().backend):
        _open(_find_context(), found.device, options)
    return found


def count_ranks() -> tuple[int, int]:
    """Return (number of ranks, number on this machine) without making a process group."""
    found: Topology | None = current().shared.get(Topology)
    if found is None or _is_stale(found):
        context = _find_context()
        return context.world_size, context.local_world_size
    return found.num_processes, found.local_num_processes


def tell(listener: Callable[[Topology], None]) -> None:
    """Register a function to be called with the topology of this rank.

    ``listener`` is called at once if the topology is known already, and whenever :func:`establish`
    determines it.
    """
    if listener not in _listeners:
        _listeners.append(listener)
    # A module that is imported asks, perhaps in a process that forks the ranks only later.
    found: Topology | None = current().shared.get(Topology) if has_context() else None
    if found is not None:
        listener(found)


def is_established() -> bool:
    """Return whether the topology of this rank has been determined."""
    return Topology in current().shared


def barrier() -> None:
    """Wait until all ranks have called this."""
    here = topology()
    if not has_process_group():
        exchange().barrier()
    elif here.num_processes > 1:
        waits = here.device.index is not None and of_torch.is_asynchronous(here.backend or "")
        dist.barrier(device_ids=[here.device.index] if waits else None)


def _find(*, cpu: bool, options: InitProcessGroupKwargs) -> Topology:
    context = _find_context()
    device = devices.choose_device(
        cpu=cpu or environment.read_flag("USE_CPU"),
        local_rank=context.local_rank,
        shared=(options.backend or environment.read("BACKEND")) == "gloo",
    )
    if device.index is not None and environment.read_flag("CPU_AFFINITY"):
        devices.set_numa_affinity(device.index)
    found = context.rank, context.world_size, context.local_rank, context.local_world_size
    driver = devices.driver(device.type)
    connected = driver and driver.connect()
    if connected is not None:
        if context.world_size not in (1, connected.size):  # as torchrun starts them
            raise ConfigError(
                f"WORLD_SIZE={context.world_size}, and {connected.backend} connects "
                f"{connected.size}: each rank would train alone. Start them by notebook_launcher, "
                "or by xmp.spawn"
            )
        current().shared[Exchange] = connected
        current().note_group()
        found = connected.rank, connected.size, connected.local_rank, connected.local_size
    elif context.world_size > 1:
        _open(context, device, options)
    backend = exchange().backend
    if has_process_group():
        pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
        by_device = {kind: name for kind, _, name in pairs}
        backend = by_device.get(device.type, dist.get_backend())
    return Topology(*found, device=device, backend=backend, pid=os.getpid())


def _find_context() -> RankContext:
    context = current()
    # Outside our launcher the environment may have been set after the context was first asked.
    said = RankContext.from_environment()
    if not has_process_group():
        return context if context.launched else said
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return RankContext(
        rank=rank,
        local_rank=said.local_rank if "LOCAL_RANK" in os.environ else rank,
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
    )


def _open(context: RankContext, device: torch.device, options: InitProcessGroupKwargs) -> None:
    # A worker of a DataLoader inherits the environment of its rank, and is none itself.
    if has_process_group() or get_worker_info() is not None:
        return
    backend = devices.default_backend(device)
    asked = options.backend or environment.read("BACKEND")
    # Who asks for the device's own backend, such as "nccl", gets gloo for CPU tensors beside it
    # ("cpu:gloo,cuda:nccl"): ranks also exchange checkpoints, offloaded weights and pickled
    # objects. Any other backend is used alone.
    if asked and backend.partition(",")[2] != f"{device.type}:{asked}":
        backend = asked
    open_process_group(context=context, backend=backend, options=options)


def _is_stale(found: Topology) -> bool:
    """Return whether a topology was inherited by ``fork`` from a process with another rank.

    This concerns forked ranks that our launcher did not start, which have their own RANK and
    WORLD_SIZE.
    """
    if found.pid == os.getpid() or current().launched:
        return False
    said = RankContext.from_environment()
    return (said.rank, said.world_size) != (found.process_index, found.num_processes)


# Keys of ``current().shared``. Of prepared models that have to be wrapped again in a new process
# group: a weak reference to each, and the function that does so.
WRAPPED = "models that are wrapped in the process group"
# Whether models are sharded over a device mesh, which is lost with its process group.
HAS_MESH = "a device mesh was made of the process group"


def renew_group() -> list[str]:
    """Make a new default process group in place of one that was destroyed; all ranks call it.

    It also wraps the models of ``WRAPPED`` again, unless models were sharded over a device mesh
    (``HAS_MESH``): then the user has to prepare them again. If this rank has made no
    ``Accelerator`` or ``PartialState``, the lost group was the user's own, and is not replaced.
    """
    if not is_established():
        return ["the process group of an earlier cell is gone: make it again where you need it"]
    establish()
    if current().shared.pop(HAS_MESH, False):
        line = (
            "the process group was made anew, and the device mesh of the one before is gone: make "
            "the Accelerator, and prepare what it trains, again"
        )
        return [line]
    wrapped = [(held(), wrap_again) for held, wrap_again in current().shared.get(WRAPPED, [])]
    # On one rank a traceback may keep a model that is gone on the others.
    alive = [index for index, (model, _) in enumerate(wrapped) if model is not None]
    everywhere = set(alive).intersection(*gather_object([alive]))
    for index in sorted(everywhere):
        model, wrap_again = wrapped[index]
        wrap_again(model)
    if not everywhere:
        return []
    line = (
        "the process group was made anew, since a cell before did not end well on every rank; "
        "prepared models have rank 0's weights now. If that cell had made steps on some ranks "
        "only, make the optimizers anew, too"
    )
    return [line]
