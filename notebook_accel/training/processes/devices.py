"""Everything that depends on the type of device, such as "cuda" or "xpu".

Most of it comes from torch: ``torch.accelerator`` gives the type, the count and the current device,
and ``torch.distributed.get_default_backend_for_device`` the backend. Each exception for a type is
one entry in a table of this file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from notebook_accel import wire
from notebook_accel.config.checks import as_choice
from notebook_accel.errors import ConfigError
from notebook_accel.rank.this_rank import DeviceMemory
from notebook_accel.training.settings import environment
from notebook_accel.training.settings.handlers import DistributedType

_PCI = Path("/sys/bus/pci/devices")
_log = logging.getLogger(__name__)

# Kinds that torch does not know: a module of this folder has what torch's own have for others.
_DRIVERS = {"xla": "notebook_accel.training.processes.xla_driver"}
HOST = torch.device("cpu")


def choose_device(*, cpu: bool, local_rank: int, shared: bool = False) -> torch.device:
    """Choose the device of this rank, make it the process's current device, and return it."""
    if cpu:
        return HOST
    for library in map(import_module, _DRIVERS.values()):
        if library.is_used():
            chosen: torch.device = library.device()
            return chosen
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    named = _named_device(accelerator)
    if accelerator is None or (named is not None and named.type == "cpu"):
        return HOST
    if named is not None and named.index is not None:
        torch.accelerator.set_device_index(named.index)
        return named
    count = torch.accelerator.device_count()
    # A rank that was given one device only finds it at index 0, whatever its local rank.
    if local_rank >= count > 1 and not shared:
        is_served = accelerator.type in dist.Backend.backend_capability.get("gloo", ())
        by_gloo = ', or use InitProcessGroupKwargs(backend="gloo") to let ranks share a device'
        raise ConfigError(
            f"local rank {local_rank} has no {accelerator.type} device: this machine shows "
            f"{count}. Start at most {count} ranks here{by_gloo if is_served else ''}"
        )
    index = local_rank % count
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def _named_device(accelerator: torch.device | None) -> torch.device | None:
    """Return the device named by the variable ACCELERATE_TORCH_DEVICE; None if it is unset."""
    text = environment.read("TORCH_DEVICE")
    if text is None:
        return None
    counts = {"cpu": 1}
    if accelerator is not None:
        counts[accelerator.type] = torch.accelerator.device_count()
    names = [f"{kind}:{index}" for kind, count in counts.items() for index in range(count)]
    return torch.device(as_choice("ACCELERATE_TORCH_DEVICE", text, (*counts, *names)))


def driver(kind: str) -> Any:
    """Return our module for a device type that torch does not know (XLA); None for the others.

    Beside what torch's modules have, it connects the ranks and begins each batch.
    """
    return import_module(_DRIVERS[kind]) if kind in _DRIVERS else None


def device_module(kind: str) -> Any:
    """Return the module with the functions of a device type, such as ``torch.cuda`` for "cuda".

    Raises:
        RuntimeError: torch has no such module, and neither has this package.
    """
    return driver(kind) or torch.get_device_module(kind)


def inventory() -> wire.Devices:
    """Find the accelerators that this process sees, with their memory and library versions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        # Torch says behind it where in its own source it warns.
        said = (str(one.message).partition(" (Triggered internally")[0] for one in caught)
        versions = {"torch": str(torch.__version__)}
        return wire.Devices(kind="cpu", versions=versions, problem="; ".join(said))
    kind = accelerator.type
    module = torch.get_device_module(kind)
    name = getattr(module, "get_device_name", lambda _: kind)
    properties = getattr(module, "get_device_properties", lambda _: None)
    indices = range(torch.accelerator.device_count())
    names = tuple(str(name(index)) for index in indices)
    return wire.Devices(
        kind=kind,
        names=names,
        memory=tuple(int(getattr(properties(index), "total_memory", 0)) for index in indices),
        versions={"torch": str(torch.__version__), **_VERSIONS.get(kind, dict)()},
    )


def _cuda_versions() -> dict[str, str]:
    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    if dist.is_nccl_available():
        version: Any = torch.cuda.nccl.version
        found["NCCL"] = ".".join(map(str, version()))
    return {name: version for name, version in found.items() if version}


# What carries the devices of a kind, for people who look for a mismatch.
_VERSIONS: dict[str, Callable[[], dict[str, str]]] = {"cuda": _cuda_versions}


def default_backend(device: torch.device) -> str:
    """Return torch's backends for a device type; CPU tensors always use gloo."""
    own = dist.get_default_backend_for_device(device)
    return own if device.type == "cpu" or own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def distributed_type(device: torch.device, num_processes: int) -> DistributedType:
    """Return the ``DistributedType`` of ``num_processes`` ranks on devices of this type."""
    if device.type in _DRIVERS:
        return DistributedType[device.type.upper()]
    if num_processes == 1:
        return DistributedType.NO
    types = DistributedType.__members__
    return types.get(f"MULTI_{device.type.upper()}", DistributedType.MULTI_GPU)


def memory_reader(device: torch.device) -> Callable[[], DeviceMemory | None] | None:
    """Return a function for the bytes allocated (or None); None where they are not counted."""
    module = None if device.type == "cpu" else device_module(device.type)
    if not hasattr(module, "memory_allocated"):
        return None

    def ask(name: str) -> Any:
        return getattr(module, name, lambda _: 0)(device)

    def read() -> DeviceMemory | None:
        used = ask("memory_allocated")
        if used is None:
            return None
        free, total = ask("mem_get_info") or (0, 0)
        # What torch's allocator keeps in reserve is free for torch, too.
        limit = min(total, free + ask("memory_reserved"))
        return DeviceMemory(used, ask("max_memory_allocated"), limit)

    return read


class EventClock:
    """Tells how long a device takes, by events among what is queued on its current stream."""

    def __init__(self, device: torch.device) -> None:
        module = getattr(torch, device.type, None)
        # What has no module, as XLA, has no events.
        self.is_host = device.type == "cpu" or module is None
        self._device = device
        # Into a graph that is being captured no event of ours may come, nor may one be asked.
        self._captures = getattr(module, "is_current_stream_capturing", bool)

    def now(self) -> Any:
        """Return an event; None if there can be none at present."""
        if self.is_host:
            return time.perf_counter_ns()
        event = None if self._captures() else torch.Event(self._device, enable_timing=True)
        if event is not None:
            event.record()
        return event

    def elapsed(self, begin: Any, end: Any) -> int | None:
        """Return the nanoseconds between two events; None while the device is not that far."""
        if self.is_host:
            return int(end - begin)
        if self._captures() or not end.query():
            return None
        return int(begin.elapsed_time(end) * 1e6)


def empty_cache(device: torch.device) -> None:
    """Free the unused device memory that torch's allocator has cached."""
    with contextlib.suppress(AttributeError):
        device_module(device.type).empty_cache()


def get_rng_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's random numbers; None for the CPU."""
    if device.type == "cpu":
        return None
    # XLA's module takes no device: it has one alone.
    own = [] if driver(device.type) else [device]
    state: torch.Tensor = device_module(device.type).get_rng_state(*own)
    return state


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore a state of the device's random numbers that :func:`get_rng_state` returned."""
    if device.type != "cpu":
        own = [] if driver(device.type) else [device]
        device_module(device.type).set_rng_state(state, *own)


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPU cores that are nearest to its CUDA device.

    Nothing happens without a CUDA device, or if Linux or an older torch does not tell which cores
    are near.

    Args:
        local_process_index: index of the CUDA device.
        verbose: whether to log the cores; None logs them in debug mode (``ACCELERATE_DEBUG_MODE``).
    """
    if not torch.cuda.is_available():
        return
    properties: Any = torch.cuda.get_device_properties(local_process_index)
    if not hasattr(properties, "pci_bus_id"):
        return
    address = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )
    file = _PCI / address / "local_cpulist"
    if not file.exists():
        return
    cores: set[int] = set()
    for part in filter(None, file.read_text().strip().split(",")):  # such as "0-3,8"
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    cores &= os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    if environment.read_flag("DEBUG_MODE") if verbose is None else verbose:
        _log.info("local rank %d runs on the cores %s", local_process_index, sorted(cores))
