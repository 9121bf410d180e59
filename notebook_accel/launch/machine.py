"""Finds out which accelerators, cores and memory this machine has.

A child process asks torch for the accelerators: a process that uses a GPU takes some GPU memory, so
this process must not use one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from notebook_accel import tpu
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import LaunchError
from notebook_accel.launch.rank_environment import num_cores, rank_environment
from notebook_accel.launch.template.handle import ask_template
from notebook_accel.wire import Devices


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator of this machine, such as a GPU.

    Attributes:
        memory: its total memory in bytes; 0 if that is unknown.
    """

    index: int
    name: str
    memory: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The accelerators, cores, memory and library versions of this machine.

    Attributes:
        memory: total memory of the host, in bytes.
        free_memory: available memory of the host, in bytes.
        problem: why torch can use no accelerator, such as an old driver; "" if torch gives no
            reason.
        error: why the accelerators could not be counted; "" if they were.
        tpu: one line about the machine's TPU and the library for it; "" if there is no TPU.
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
    """Return the devices, cores and memory of this machine; a child process asks torch.

    If the child process fails, the result has no devices, and its ``error`` says why.
    """
    environment = rank_environment(LaunchConfig())
    try:
        found = ask_template(environment, lambda source: source.count_devices(environment))
    except LaunchError as failed:
        found = Devices(kind="cpu", error=str(failed))
    return machine_with(found)


def machine_with(found: Devices) -> Machine:
    """Return the description of this machine from accelerators that were counted already."""
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
