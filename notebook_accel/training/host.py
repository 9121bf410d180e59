"""The machine under a rank: which cores are near its device, and how old the kernel is."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from notebook_accel.training import environment

__all__ = [
    "check_cuda_p2p_ib_support",
    "set_numa_affinity",
]

_PCI = Path("/sys/bus/pci/devices")
_log = logging.getLogger(__name__)


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Keep this process on the cores that are nearest to its CUDA device.

    Nothing happens where there is no such device, or the machine (or an older torch) does not say
    which cores.

    Args:
        local_process_index: the device's index.
        verbose: log the cores; None does it in debug mode (``ACCELERATE_DEBUG_MODE``).
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
    cores = parse_cores(file.read_text()) & os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    if environment.read_flag("DEBUG_MODE") if verbose is None else verbose:
        _log.info("local rank %d runs on the cores %s", local_process_index, sorted(cores))


def parse_cores(text: str) -> set[int]:
    """The numbers in a list such as "0-3,8"."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def check_cuda_p2p_ib_support() -> bool:
    """Whether several devices may speak to each other directly.

    GeForce cards of the 40 series cannot with drivers before 550.40.07.
    """
    try:
        names, drivers = _ask_nvidia("name"), _ask_nvidia("driver_version")
    except (OSError, subprocess.SubprocessError):
        return True
    is_concerned = len(names) > 1 and any("RTX 40" in name for name in names)
    return not is_concerned or TorchVersion(drivers[0]) >= "550.40.07"


def _ask_nvidia(field: str) -> list[str]:
    """A field of each device."""
    asked = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    answer = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=30).stdout
    return [line.strip() for line in answer.splitlines() if line.strip()]
