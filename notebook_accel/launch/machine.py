"""What this machine has to train on, found out without using any of it here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from notebook_accel import tpu
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import LaunchError
from notebook_accel.launch.control.environment import num_cores, rank_environment
from notebook_accel.launch.template.handle import ask_template
from notebook_accel.launch.wire import Devices

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Device", "Machine", "look_at_machine", "machine_with"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        index: among those that are visible.
        name: as its driver says.
        memory: bytes in all; 0 where that is unknown.
    """

    index: int
    name: str
    memory: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices, cores, memory and versions of this machine.

    Attributes:
        kind: torch's device type of the accelerators; "cpu" if there are none.
        devices: the accelerators.
        num_cores: number of cores that this process may use.
        memory: bytes of memory of the host in all.
        free_memory: bytes of it that are available.
        versions: versions of torch and of the accelerators' library.
        problem: why torch can use no accelerator; "" if torch does not say.
        error: why the accelerators could not be counted; "" where they could.
        tpu: one line on its TPU and the library for it; "" where there is none.
    """

    kind: str
    devices: tuple[Device, ...]
    num_cores: int
    memory: int
    free_memory: int
    versions: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    error: str = ""
    tpu: str = ""


def look_at_machine() -> Machine:
    """Return the devices, cores and memory of this machine; a child process asks torch."""
    environment = rank_environment(LaunchConfig())
    try:
        found = ask_template(environment, lambda source: source.count_devices(environment))
    except LaunchError as failed:
        found = Devices(kind="cpu", error=str(failed))
    return machine_with(found)


def machine_with(found: Devices) -> Machine:
    """Return this machine with the given accelerators."""
    memories = found.memory or (0,) * len(found.names)
    memory = psutil.virtual_memory()
    return Machine(
        kind=found.kind,
        devices=tuple(
            Device(index=index, name=name, memory=memory)
            for index, (name, memory) in enumerate(zip(found.names, memories, strict=True))
        ),
        num_cores=num_cores(),
        memory=memory.total,
        free_memory=memory.available,
        versions=found.versions,
        problem=found.problem,
        error=found.error,
        tpu=tpu.summary(),
    )
