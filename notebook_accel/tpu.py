"""Finds this machine's TPUs and the library installed for them, without importing the library.

torch_xla takes seconds to import, and the first call of one of its functions starts its runtime,
which claims the chips. While a process holds a chip, no other process can use it, so the notebook's
kernel must never hold one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import NamedTuple

from notebook_accel.errors import LaunchError
from notebook_accel.private.of_libraries import without_debugger

_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# Devices of a chip, by its number on the PCI bus: v2 and v3, v4, v5e, v6e, v7. The same table as in
# torch_xla/_internal/tpu.py (2.9.0).
_DEVICES_OF_CHIP = {"0x0027": 2, "0x005e": 1, "0x0063": 1, "0x006f": 1, "0x0076": 2}
# What a platform, or an earlier launch, leaves behind about processes that are none of this launch.
LEFTOVERS = (
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "TPU_VISIBLE_CHIPS",
    "CLOUD_TPU_TASK_ID",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
)
INSTALL = "pip install 'notebook-accel[tpu]', and restart the kernel"
DEVICE_VARIABLES = "PJRT_DEVICE and CPU_NUM_DEVICES"
# Torch imports libraries for other kinds of devices by itself, unless this is "0".
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# What torch_tpu has decided before ranks begin, printed for whoever starts them; in a process of
# its own, since whoever imports it may claim a chip.
_ASK_TORCH_TPU = """
import json, os, sys, torch, torch_tpu
torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=int(sys.argv[1]))
print(json.dumps({name: os.environ[name] for name in os.environ if name.startswith("TORCH_TPU_")}))
"""
_ASK_SECONDS = 120.0


class Library(NamedTuple):
    """torch_xla or torch_tpu; ``problem`` says why it cannot be used, and what to do, or is ""."""

    name: str
    version: str
    problem: str = ""


def library() -> Library | None:
    """Return torch_tpu before torch_xla; one built for another torch has a ``problem``."""
    own = _version("torch_tpu")
    if own is not None:
        return Library("torch_tpu", own)
    xla = _version("torch_xla")
    if xla is None:
        return None
    torch = _version("torch") or "none"
    if torch.split(".")[:2] == xla.split(".")[:2]:
        return Library("torch_xla", xla)
    fitting = ".".join(xla.split(".")[:2])
    return Library(
        "torch_xla",
        xla,
        f"torch_xla {xla} is built for torch {fitting}, and torch {torch} is installed, with which "
        f"it cannot be imported: pip install 'torch=={fitting}.*' 'torch_xla=={fitting}.*', and "
        "restart the kernel",
    )


@cache
def backends() -> tuple[EntryPoint, ...]:
    """Return the entry points ``torch.backends`` that ``import torch`` loads.

    The search reads all packages' metadata: the template calls it once, ranks inherit the cache.
    """
    return tuple(entry_points(group="torch.backends"))


def load_backends() -> None:
    """Load the device libraries that ``import torch`` would have loaded.

    The template imports torch without them, as it must not touch a device. So each rank, and each
    child process that lists the devices, calls this.
    """
    is_off = os.environ.get(AUTOLOAD) == "0" or os.environ.get("ACCELERATE_USE_CPU") == "true"
    for entry in () if is_off else backends():
        entry.load()()


def launch_variables(environment: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Return the ``TORCH_TPU_*`` variables by which ranks on this machine find each other.

    A child process asks torch_tpu, since importing it may claim a chip. LaunchError if it fails.
    """
    asked = [sys.executable, "-c", _ASK_TORCH_TPU, str(num_ranks)]
    try:
        with without_debugger():
            told = subprocess.run(
                asked,
                env={**environment, AUTOLOAD: "0"},
                capture_output=True,
                text=True,
                timeout=_ASK_SECONDS,
                check=True,
            ).stdout
    except subprocess.SubprocessError as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        last = (said.strip().splitlines() or [str(error)])[-1]
        raise LaunchError(
            f"torch_tpu could not prepare {num_ranks} ranks: {last}. Choose a runtime with a TPU "
            "that nobody else uses, or launch with devices='cpu'"
        ) from None
    found: dict[str, str] = json.loads(told.strip().splitlines()[-1])
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def count_chips() -> dict[str, int]:
    """Count the chips on the PCI bus, by PCI device id (``{"0x0063": 4}``); {} without a bus."""
    chips: dict[str, int] = {}
    with contextlib.suppress(OSError):  # no bus, or no descriptor left, which the launch says
        for vendor in _PCI.glob("*/vendor"):
            if vendor.read_text().strip() == _GOOGLE:
                kind = vendor.with_name("device").read_text().strip()
                if kind in _DEVICES_OF_CHIP:
                    chips[kind] = chips.get(kind, 0) + 1
    return chips


def count_devices(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return torch_xla's platform ("TPU", "CPU"... or "") and number of devices, 0 for others."""
    chips = count_chips()
    platform = environment.get("PJRT_DEVICE") or ("TPU" if chips else "")
    if platform == "CPU":
        return platform, int(environment.get("CPU_NUM_DEVICES") or 1)
    if platform == "TPU":
        return platform, sum(_DEVICES_OF_CHIP[kind] * number for kind, number in chips.items())
    return platform, 0


def summary() -> str:
    """Return a line for the user about this machine's TPU and its library; "" without a TPU."""
    platform, count = count_devices(os.environ)
    if platform != "TPU" or not count:
        return ""
    found = library()
    if found is None:
        return f"TPU (devices: {count}), and no library for it: {INSTALL}"
    return found.problem or f"TPU (devices: {count}) by {found.name} {found.version}"


def is_torch_xlas(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a TPU is here that torch_xla can use; None is this process's environment."""
    found = library()
    if found is None or found.name != "torch_xla" or found.problem:
        return False
    platform, count = count_devices(os.environ if environment is None else environment)
    return platform == "TPU" and count > 0
